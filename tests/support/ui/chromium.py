"""Debian's Chromium without a screen, driven over its DevTools protocol: no driver, no library."""

from __future__ import annotations

import asyncio
import base64
import shutil
import subprocess
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from itertools import count
from pathlib import Path
from typing import Any

import aiohttp

from support.system import debian_packages

START_S = 120.0
ANSWER_S = 90.0
_FLAGS = (
    *("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"),
    *("--no-first-run", "--no-default-browser-check", "--disable-extensions"),
    *("--disable-background-networking", "--disable-component-update", "--disable-sync"),
    *("--hide-scrollbars", "--force-color-profile=srgb", "--remote-debugging-port=0"),
)


class BrowserError(AssertionError):
    """What the browser says of a script of the test's."""


class Tab:
    """One page. `said`: what came to its console, as text; `dialogs`: alerts and the like."""

    def __init__(self, socket: aiohttp.ClientWebSocketResponse) -> None:
        self._socket = socket
        self._numbers = count(1)
        self._answers: dict[int, asyncio.Future[dict[str, Any]]] = {}
        self._loaded = asyncio.Event()
        self.said: list[str] = []
        self.dialogs: list[str] = []
        self._reader = asyncio.create_task(self._read())

    async def command(self, method: str, **parameters: Any) -> dict[str, Any]:
        number = next(self._numbers)
        answer = self._answers[number] = asyncio.get_running_loop().create_future()
        await self._socket.send_json({"id": number, "method": method, "params": parameters})
        async with asyncio.timeout(ANSWER_S):
            return await answer

    async def _read(self) -> None:
        async for message in self._socket:
            found = message.json()
            if "id" in found:
                answer = self._answers.pop(found["id"])
                if "error" in found:
                    answer.set_exception(BrowserError(str(found["error"])))
                else:
                    answer.set_result(found["result"])
            else:
                await self._note(found["method"], found["params"])

    async def _note(self, method: str, told: dict[str, Any]) -> None:
        if method == "Page.loadEventFired":
            self._loaded.set()
        elif method == "Page.javascriptDialogOpening":
            self.dialogs.append(told["message"])
            closing = {"id": 0, "method": "Page.handleJavaScriptDialog", "params": {"accept": True}}
            self._answers[0] = asyncio.get_running_loop().create_future()
            await self._socket.send_json(closing)
        elif method == "Log.entryAdded":
            entry = told["entry"]
            self.said.append(f"{entry['level']}: {entry['text']} {entry.get('url', '')}")
        elif method == "Runtime.exceptionThrown":
            self.said.append(str(told["exceptionDetails"].get("exception", {}).get("description")))

    async def open(self, url: str) -> None:
        """Loaded on return, with its modules run."""
        self._loaded.clear()
        await self.command("Page.navigate", url=url)
        await self.loaded()

    async def loaded(self) -> None:
        async with asyncio.timeout(ANSWER_S):
            await self._loaded.wait()
        self._loaded.clear()

    async def run(self, script: str) -> Any:
        """The value of an expression, or of its promise."""
        answer = await self.command(
            "Runtime.evaluate", expression=script, awaitPromise=True, returnByValue=True
        )
        if "exceptionDetails" in answer:
            raise BrowserError(str(answer["exceptionDetails"]))
        return answer["result"].get("value")

    async def until(self, script: str) -> None:
        """Until an expression is true."""
        async with asyncio.timeout(ANSWER_S):
            while not await self.run(f"Boolean({script})"):  # noqa: ASYNC110
                await asyncio.sleep(0.05)

    async def arrive_at(self, path: str) -> None:
        """Until the page of this path is loaded, over however many redirects."""
        async with asyncio.timeout(ANSWER_S):
            while True:
                with suppress(BrowserError):  # a page that is left answers nothing
                    if (
                        await self.run("document.readyState === 'complete' && location.pathname")
                        == path
                    ):
                        return
                await asyncio.sleep(0.05)

    async def press(self, key: str) -> None:
        named = {"Enter": "\r"}.get(key, key if len(key) == 1 else "")
        more = {"text": named} if named else {}
        for kind in ("keyDown", "keyUp"):
            pressed = {"type": kind, "key": key, **(more if kind == "keyDown" else {})}
            await self.command("Input.dispatchKeyEvent", **pressed)

    async def look_like(self, *, width: int, height: int, dark: bool) -> None:
        await self.command(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=1,
            mobile=False,
        )
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        await self.command("Emulation.setEmulatedMedia", features=[scheme])

    async def screenshot(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        made = await self.command("Page.captureScreenshot", format="png")
        path.write_bytes(base64.b64decode(made["data"]))  # noqa: ASYNC240

    async def close(self) -> None:
        self._reader.cancel()
        with suppress(asyncio.CancelledError):
            await self._reader
        await self._socket.close()


@asynccontextmanager
async def chromium() -> AsyncIterator[Tab]:
    """A tab of a browser of its own, which ends with the block."""
    if shutil.which("chromium") is None:
        debian_packages.install("chromium")
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        command = ["chromium", *_FLAGS, f"--user-data-dir={folder}", "about:blank"]
        with open(Path(folder) / "log", "wb") as log:  # noqa: ASYNC230
            process = subprocess.Popen(command, stdout=log, stderr=log)  # noqa: ASYNC220
        try:
            port = await _port(Path(folder), process)
            async with aiohttp.ClientSession() as session:
                tab = await _tab(session, port)
                yield tab
                await tab.close()
        finally:
            process.terminate()
            process.wait(30)


async def _port(folder: Path, process: subprocess.Popen[bytes]) -> int:
    named = folder / "DevToolsActivePort"
    async with asyncio.timeout(START_S):
        while not (named.exists() and named.read_text().count("\n")):
            if process.poll() is not None:
                raise BrowserError((folder / "log").read_text(errors="replace")[-2000:])
            await asyncio.sleep(0.05)
    return int(named.read_text().split()[0])


async def _tab(session: aiohttp.ClientSession, port: int) -> Tab:
    async with session.get(f"http://127.0.0.1:{port}/json/list") as answer:
        [page] = [each for each in await answer.json() if each["type"] == "page"]
    socket = await session.ws_connect(page["webSocketDebuggerUrl"], max_msg_size=0)
    tab = Tab(socket)
    for domain in ("Page", "Runtime", "Log"):
        await tab.command(f"{domain}.enable")
    return tab

"""Contents of messages in the forms that clients send."""

from __future__ import annotations

CONTENTS = {
    "{% for m in messages %}{% for part in m.content %}{% endfor %}{% endfor %}": True,
    "{% for m in messages %}{% for part in m['content'] | list %}{% endfor %}{% endfor %}": True,
    "{% for m in messages[1:] %}{{ m.content }}{% endfor %}": False,
    "{% set rest = messages[1:] %}{% for m in rest %}{% for p in m.content %}{% endfor %}"
    "{% endfor %}": True,
    "{% for m in messages %}{% for call in m.tool_calls %}{% endfor %}{% endfor %}": False,
    "{% macro show(c) %}{% for p in c %}{% endfor %}{% endmacro %}"
    "{% for m in messages %}{{ show(m.content) }}{% endfor %}": True,
    "{% macro show(c) %}{% for p in c %}{% endfor %}{% endmacro %}"
    "{% for m in messages %}{{ show(c=m.content) }}{{ show(m.role) }}{% endfor %}": True,
    "{% macro show(content) %}{% for p in content %}{% endfor %}{% endmacro %}"
    "{% for m in messages %}{{ show(m.role) }}{% endfor %}": False,
    "{% set content = 1 %}{% for p in content %}{% endfor %}": True,
    "{% for a, b in messages %}{% endfor %}": False,
    "{{ messages[0].content }}": False,
}

from verl.tools.function_tool import function_tool
from warehouse import STOCK


@function_tool
def stock(item: str, city: str) -> str:
    """Units on hand.

    Args:
        item: what is counted
        city: where
    """
    return str(STOCK.get((item, city), "error"))

"""Tools that many tests declare."""

from perdure import tool


@tool(approval="always")
def pay(amount: int) -> str:
    """Pay."""
    return f"paid {amount}"

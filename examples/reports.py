r"""Reports by programs that the model writes: many calls, one reply of the model.

PERDURE_MODEL=anthropic:claude-sonnet-4-5 perdure dev --agents examples.reports:agent

It needs the extra `codemode`, which a checkout has. The built-in demo model writes no programs, but takes one:

perdure dev --agents examples.reports:agent
curl -s http://127.0.0.1:8000/eve/v1/session -d @- <<'END'
{"message": "use code_mode {\"code\": \"ada = await find_orders('Ada'); await send_reminder('Ada', ada[1]['total'])\"}"}
END
perdure tail SESSION_ID                       # the calls of the program; the last one needs an approval
"""

from typing import TypedDict

from perdure import Agent, tool


class Order(TypedDict):
    number: str
    customer: str
    total: float
    paid: bool


ORDERS = [
    Order(number="A1", customer="Ada", total=30.0, paid=True),
    Order(number="A2", customer="Ada", total=120.0, paid=False),
    Order(number="B1", customer="Bo", total=15.5, paid=False),
]


@tool(effects="pure")
def find_orders(customer: str) -> list[Order]:
    """Find the orders of a customer."""
    return [order for order in ORDERS if order["customer"] == customer]


# People are asked about each letter, and none is sent twice: as if the model had called the tool itself.
@tool(approval="always", summary=lambda arguments: f"Remind {arguments['customer']} of {arguments['amount']:.2f}")
def send_reminder(customer: str, amount: float) -> str:
    """Send a customer a letter that says how much is to be paid."""
    return f"sent to {customer}: {amount:.2f}"


agent = Agent(
    name="reports",
    instructions="Answer questions about orders. Write one program for all that you have to look up.",
    tools=[find_orders, send_reminder],
    code_mode=True,
)

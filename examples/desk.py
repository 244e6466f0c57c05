"""The other side of refunds: a program that answers what examples/approvals.py asks the people of the support.

It needs `perdure.client` alone, and runs wherever HTTP reaches: on another machine, in a cron job, in a bot.

    perdure api-key desk --role support          # its key; the entry goes into PERDURE_API_KEYS of the API
    PERDURE_KEY=… python -m examples.desk https://agents.example 50
"""

import os
import sys
from collections.abc import Iterator

from perdure.client import Client, ClientError


def settle(client: Client, limit: float) -> Iterator[str]:
    """Approve the refunds up to a limit; what is larger is left for a person."""
    for request in client.inputs(agent="refunds", kind="approval"):
        amount = request["arguments"].get("amount")
        if request["tool"] != "refund" or amount > limit:
            yield f"{request['summary']}: left for a person"
            continue
        try:
            # Repeated, it is the same answer: the program may be stopped and started at any time.
            client.answer(request["requestId"], "approve", reason=f"up to {limit:g} without a look")
        except ClientError as error:
            # Somebody was faster, or it has expired.
            if error.code not in ("input_closed", "input_expired"):
                raise
            yield f"{request['summary']}: {error.message}"
        else:
            yield f"{request['summary']}: approved"


def main(url: str, limit: str) -> None:
    with Client(url, key=os.environ.get("PERDURE_KEY")) as client:
        for line in settle(client, float(limit)):
            print(line)  # noqa: T201


if __name__ == "__main__":
    main(*sys.argv[1:3])

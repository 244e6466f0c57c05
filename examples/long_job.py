r"""A long job: the model plans it, each finding is kept, and it goes on wherever it was killed.

perdure dev --agents examples.long_job:agent
python -m examples.long_job                    # in another terminal; it takes half a minute

Kill what you like while it works, as often as you like:

perdure dev --kill worker

The step that ran is done again, and none of those before it. End the program itself with Ctrl-C, and start it again:
it finds the same job under its key, or the report if that is there by now. `--key` names another job.
The built-in demo model is enough to see it; it carries out the field `demo` of the request.
"""

import argparse
import asyncio
import json
import sys
from dataclasses import dataclass

from pydantic import BaseModel

import perdure
from perdure import Agent, Planning, Progress, Prompt, Section, SessionView, Slice, ToolContext, tool, upsert_by

_TASTES = {"Assam": 7, "Darjeeling": 9, "Ceylon": 8}


class Job(BaseModel):
    """What is asked for. Only the demo model needs `demo`."""

    drink: str
    kinds: list[str]
    demo: str = ""


class Report(BaseModel):
    best: str
    why: str


@dataclass(frozen=True)
class Finding:
    kind: str
    score: int


# One finding for each kind, however often it is tasted.
FINDINGS = Slice("findings", Finding, reducer=upsert_by(lambda finding: finding.kind))


@tool(effects="pure", timeout=60, into=FINDINGS)
async def taste(ctx: ToolContext, kind: str, seconds: float = 5.0) -> Finding:
    """Taste one kind, and keep the score.

    Args:
        kind: Which one.
        seconds: How long it takes.
    """
    await asyncio.sleep(min(seconds, 30.0))
    ctx.log.info("tasted %s", kind)
    return Finding(kind, _TASTES.get(kind, 5))


def _scores(session: SessionView) -> str:
    return "\n".join(f"{each.kind}: {each.score} of 10" for each in session.items(FINDINGS))


agent = Agent(
    name="taster",
    instructions=Prompt(
        Section("Objective", "Find out which kind of $drink is the best. Taste each kind of the request once."),
        Progress(),
        Section("Scores so far", _scores),
    ),
    planning=Planning(),
    tools=[taste],
)


def job(seconds: float) -> Job:
    """The request, with what the demo model is to do: plan, taste, and mark each step as done."""
    plan = {"objective": "Find the best tea", "initial_steps": [*(f"Taste {kind}" for kind in _TASTES), "Report"]}
    todo = [f"use planning_setup_plan {json.dumps(plan)}"]
    for step, kind in enumerate(_TASTES, 1):
        todo.append(f"use taste {json.dumps({'kind': kind, 'seconds': seconds})}")
        todo.append(f"use planning_update_step {json.dumps({'step_id': step, 'status': 'done'})}")
    todo.append(f"use planning_update_step {json.dumps({'step_id': len(_TASTES) + 1, 'status': 'done'})}")
    todo.append(f"use final_output {json.dumps({'best': 'Darjeeling', 'why': 'It has 9 of 10.'})}")
    return Job(drink="tea", kinds=list(_TASTES), demo=" then ".join(todo))


async def report(key: str, seconds: float = 8.0) -> Report:
    """The report of the job with this key, which is started if there is none."""
    async with perdure.connect() as sessions:
        while True:
            try:
                return await sessions.execute("taster", job(seconds), output=Report, key=key, timeout=5)
            except TimeoutError:
                # Only the wait has ended.
                sys.stderr.write("still at work …\n")


def main() -> None:
    options = argparse.ArgumentParser(prog="python -m examples.long_job")
    options.add_argument("--key", default="tea", help="which job; the same key is the same job")
    found = asyncio.run(report(options.parse_args().key))
    sys.stdout.write(f"{found.best}: {found.why}\n")


if __name__ == "__main__":
    main()

"""What a turn returns to its driver. A closed set: a pinned driver must know every kind that it can receive."""

from typing import Annotated, Any, Literal, TypeAlias

from pydantic import Field

from .wire import Wire


class Done(Wire):
    """The session has ended."""

    kind: Literal["done"] = "done"
    output: Any = None
    is_error: bool = False


class Park(Wire):
    """Wait for the next delivery, durably."""

    kind: Literal["park"] = "park"
    authorization_names: tuple[str, ...] = ()


class DispatchRuntimeActions(Wire):
    """Start children and wait for their results."""

    kind: Literal["dispatch-runtime-actions"] = "dispatch-runtime-actions"
    pending_action_keys: tuple[str, ...] = ()


class DispatchCodeModeRuntimeActions(Wire):
    """As `DispatchRuntimeActions`, for a program that the model wrote."""

    kind: Literal["dispatch-code-mode-runtime-actions"] = "dispatch-code-mode-runtime-actions"
    pending_action_keys: tuple[str, ...] = ()


Action: TypeAlias = Annotated[
    Done | Park | DispatchRuntimeActions | DispatchCodeModeRuntimeActions, Field(discriminator="kind")
]

"""From a provider's exception to `ModelFailed`: its message is ours, and what the provider said is its reason."""

import re
from collections.abc import Mapping
from typing import Any, cast

from pydantic_ai.exceptions import (
    ModelAPIError,
    ModelAuthenticationError,
    ModelConnectionError,
    ModelHTTPError,
    ModelQuotaExceededError,
    ModelRateLimitError,
    ModelRequestRejectedError,
    ModelRequestTimeout,
    UnexpectedModelBehavior,
    UserError,
)

from perdure.errors import ModelFailed
from perdure.text import shortened

from .base import UNSENT

_SECRET = re.compile(
    r"(?i)\b(?:sk|pk|rk|key|xai|gsk|ghp|aiza)[-_][\w*.-]{6,}|bearer\s+\S+|[?&](?:key|token|api_key)=\S+"
)
#: Longer runs without a space are more likely a credential or a blob than words.
_BLOB = re.compile(r"[A-Za-z0-9+/_=*.-]{40,}")
_LONGEST = 300
_REJECTIONS = frozenset(
    {
        "bio_policy",
        "data_residency_mismatch",
        "empty_image_file",
        "misalignment_policy_violation",
        "unsupported_image_media_type",
    }
)


def failure(model: str, error: Exception, *, asked: bool = False, answered: bool = False) -> ModelFailed:
    """What went wrong, and whether asking again can help; an answer that has begun is paid for.

    `asked`: it happened with a request. What no provider and no connection has raised is then about what is in it.
    """
    unsent: dict[str, Any] = {UNSENT: True} if asked and not answered else {}
    match error:
        case ModelFailed():
            return error
        case ModelHTTPError():
            return _http(model, error)
        case ModelConnectionError() | ModelRequestTimeout():
            what = "did not answer in time" if _timed_out(error) else "could not be reached, or broke off its answer"
            return ModelFailed(f"The model {model} {what}.", transient=True, retry_after=error.retry_after)
        case ModelAPIError() if isinstance(error.__cause__, ValueError):
            return _unreadable(model)
        case ModelAPIError():
            # What a provider says about credentials tends to quote them.
            private = isinstance(error, ModelAuthenticationError)
            told = None if private else error.body or (error.message if error.provider_error_code else None)
            return ModelFailed(
                f"The model {model} reported an error.",
                transient=not _rejected(error),
                retry_after=error.retry_after,
                reason=_said(told),
            )
        case UnexpectedModelBehavior():
            return _unreadable(model)
        case UserError():
            # Its text comes from pydantic-ai and names the missing variable or the unknown model.
            return ModelFailed(f"The model {model} cannot be used.", reason=public(str(error)), **unsent)
        case OSError() | TimeoutError():
            return ModelFailed(f"The model {model} could not be reached.", transient=True)
        case _:
            return ModelFailed(f"The model {model} failed ({type(error).__name__}).", transient=False, **unsent)


def _rejected(error: ModelAPIError) -> bool:
    """Whether the provider means the request, and not its own state."""
    if isinstance(error, ModelRequestRejectedError | ModelQuotaExceededError):
        return True
    # Codes of OpenAI's Responses API for which pydantic-ai has no category.
    code = error.provider_error_code or ""
    return code in _REJECTIONS or code.startswith(("invalid_", "image_"))


def truncated(model: str) -> ModelFailed:
    return ModelFailed(f"The model {model} broke off its answer.", transient=True)


def _unreadable(model: str) -> ModelFailed:
    # It came whole: a connection that breaks has errors of its own. So it may be paid for, and asking again would be
    # to pay again.
    return ModelFailed(f"The model {model} sent an answer that makes no sense.")


def _http(model: str, error: ModelHTTPError) -> ModelFailed:
    status = error.status_code
    transient = (status in (408, 409, 429) or status >= 500) and not isinstance(error, ModelQuotaExceededError)
    # The SDKs follow this header when they retry; we took that over from them.
    if error.provider_retry_hint is not None and not isinstance(error, ModelRateLimitError):
        transient = error.provider_retry_hint
    return ModelFailed(
        f"The model {model} answered {status}.",
        transient=transient,
        retry_after=error.retry_after,
        reason=None if status in (401, 403) else _said(error.body),
        statusCode=status,
    )


def _said(body: object) -> str | None:
    """The provider's own sentence, if it can be found."""
    for _ in range(2):
        if isinstance(body, Mapping):
            known = cast("Mapping[str, Any]", body)
            body = known.get("message") or known.get("error")
    return public(body) if isinstance(body, str) and body else None


def public(text: str) -> str:
    """Free of what looks like a credential, short, and on one line."""
    return shortened(_BLOB.sub("[…]", _SECRET.sub("[redacted]", " ".join(text.split()))), _LONGEST)


def _timed_out(error: ModelAPIError) -> bool:
    return isinstance(error, ModelRequestTimeout) or "timed out" in str(error).lower()

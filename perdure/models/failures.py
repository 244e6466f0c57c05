"""From a provider's exception to `ModelFailed`: the message is Perdure's, the reason has the provider's text."""

import re
from collections.abc import Mapping
from typing import Any, cast

from pydantic_ai.exceptions import (
    ModelAPIError,
    ModelAuthenticationError,
    ModelConnectionError,
    ModelContextWindowExceededError,
    ModelHTTPError,
    ModelQuotaExceededError,
    ModelRateLimitError,
    ModelRequestRejectedError,
    ModelRequestTimeout,
    UnexpectedModelBehavior,
    UserError,
)

from perdure.bounds import shortened
from perdure.errors import ModelFailed

#: A key in the details of `ModelFailed`: the request could not be encoded, because of its content.
UNSENT = "unsent"

_SECRET = re.compile(
    r"(?i)\b(?:sk|pk|rk|key|xai|gsk|ghp|aiza)[-_][\w*.-]{6,}|bearer\s+\S+|[?&](?:key|token|api_key)=\S+"
)
#: Longer runs without a space are more likely a credential or a blob than words.
_BLOB = re.compile(r"[A-Za-z0-9+/_=*.-]{40,}")
#: How providers that name no code say that a request is larger than the context window.
_TOO_LONG = re.compile(
    r"(?i)context[ _](?:length|window|size)|(?:prompt|input|request|message)s? (?:is|are) too (?:long|large)"
    r"|reduce the length|too many (?:input )?tokens|maximum (?:number of|input) tokens|input token count"
)
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
    """The failure, and whether a retry can help.

    `asked`: the error occurred during a model call. `answered`: the reply had begun, so it is paid for. During a call
    and before a reply, the content of the request causes every error that neither provider nor connection raised.
    """
    failed = _failure(model, error, asked=asked, answered=answered)
    if _is_too_long(error):
        failed.too_long, failed.transient = True, False
    return failed


def _is_too_long(error: Exception) -> bool:
    """Whether the request is larger than the model's context window."""
    if isinstance(error, ModelContextWindowExceededError):
        return True
    if not isinstance(error, ModelAPIError) or isinstance(error, ModelRateLimitError):
        return False
    status = error.status_code if isinstance(error, ModelHTTPError) else None
    return status == 413 or (status in (None, 400, 422) and bool(_TOO_LONG.search(f"{error.body} {error.message}")))


def _failure(model: str, error: Exception, *, asked: bool, answered: bool) -> ModelFailed:
    unsent: dict[str, Any] = {UNSENT: True} if asked and not answered else {}
    match error:
        case ModelFailed():
            return error
        case ModelHTTPError():
            return _http(model, error)
        case ModelConnectionError() | ModelRequestTimeout():
            late = isinstance(error, ModelRequestTimeout) or "timed out" in str(error).lower()
            what = "did not answer in time" if late else "could not be reached, or broke off its answer"
            return ModelFailed(f"The model {model} {what}.", transient=True, retry_after=error.retry_after)
        case ModelAPIError() if isinstance(error.__cause__, ValueError):
            return _unreadable(model)
        case ModelAPIError():
            # A provider's text about credentials often quotes them.
            private = isinstance(error, ModelAuthenticationError)
            text = None if private else error.body or (error.message if error.provider_error_code else None)
            return ModelFailed(
                f"The model {model} reported an error.",
                transient=not _rejected(error),
                retry_after=error.retry_after,
                reason=_provider_text(text),
            )
        case UnexpectedModelBehavior():
            return _unreadable(model)
        case UserError():
            # The text is from pydantic-ai: it names the missing variable or the unknown model.
            return ModelFailed(f"The model {model} cannot be used.", reason=public(str(error)), **unsent)
        case OSError() | TimeoutError():
            return ModelFailed(f"The model {model} could not be reached.", transient=True)
        case _:
            return ModelFailed(f"The model {model} failed ({type(error).__name__}).", transient=False, **unsent)


def _rejected(error: ModelAPIError) -> bool:
    """Whether the provider refuses this request, so that a retry cannot help."""
    if isinstance(error, ModelRequestRejectedError | ModelQuotaExceededError):
        return True
    # Codes of OpenAI's Responses API for which pydantic-ai has no category.
    code = error.provider_error_code or ""
    return code in _REJECTIONS or code.startswith(("invalid_", "image_"))


def _unreadable(model: str) -> ModelFailed:
    # The answer was complete, because a broken connection raises other errors. It may be paid for, so a retry would pay
    # again.
    return ModelFailed(f"The model {model} sent an answer that makes no sense.")


def _http(model: str, error: ModelHTTPError) -> ModelFailed:
    status = error.status_code
    transient = (status in (408, 409, 429) or status >= 500) and not isinstance(error, ModelQuotaExceededError)
    # The SDKs honour this header in their retries; Perdure retries instead of them, so it does too.
    if error.provider_retry_hint is not None and not isinstance(error, ModelRateLimitError):
        transient = error.provider_retry_hint
    return ModelFailed(
        f"The model {model} answered {status}.",
        transient=transient,
        retry_after=error.retry_after,
        reason=None if status in (401, 403) else _provider_text(error.body),
        statusCode=status,
    )


def _provider_text(body: object) -> str | None:
    """The error text in the provider's response, if there is one."""
    for _ in range(2):
        if isinstance(body, Mapping):
            known = cast("Mapping[str, Any]", body)
            body = known.get("message") or known.get("error")
    return public(body) if isinstance(body, str) and body else None


def public(text: str) -> str:
    """The text on one line, shortened, without anything that looks like a credential."""
    return shortened(_BLOB.sub("[…]", _SECRET.sub("[redacted]", " ".join(text.split()))), _LONGEST)

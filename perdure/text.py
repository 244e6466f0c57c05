"""Text that everybody can take: the engine, the databases, the providers and the readers."""


def whole(text: str) -> str:
    """The text with what is no character replaced: half of a surrogate pair, which no UTF-8 can hold."""
    if text.isascii():
        return text
    try:
        text.encode()
    except UnicodeEncodeError:
        # In UTF-16 two halves that belong together become the character they mean.
        return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    return text


def described(error: BaseException) -> str:
    """The error's type and what it says; it may not be able to say anything."""
    try:
        said = str(error)
    except Exception:
        said = "(no text)"
    return whole(f"{type(error).__name__}: {said}")

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


def shortened(text: str, longest: int) -> str:
    """At most so many characters; an ellipsis says that there were more."""
    return text if len(text) <= longest else text[: longest - 1] + "…"


def quoted(text: str, longest: int = 100) -> str:
    """Text of a caller or a provider, for where it is quoted: short, and with nothing in it that cannot be printed."""
    # Cut first: there may be megabytes of it.
    return "".join(character if character.isprintable() else "\ufffd" for character in shortened(text, longest))

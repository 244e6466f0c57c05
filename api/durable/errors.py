"""What a reader of a log is refused."""

from perdure.errors import NotFound, PerdureError


class StreamNotFound(NotFound):
    """There is no such stream."""

    code = "stream_not_found"


class OffsetGone(PerdureError):
    """The offset is beyond the end of the stream."""

    status = 416
    code = "stream_offset_gone"

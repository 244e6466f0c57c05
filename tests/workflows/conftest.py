"""Workers for workflows, over activities that a test scripts."""

from tests.support.workflows import bench as bench
from tests.support.workflows import outside as outside
from tests.support.workflows import working as working

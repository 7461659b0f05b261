import pytest
from web_making import serving


@pytest.fixture(scope="module")
def address(service):
    """Where the file's ``service`` answers."""
    with serving(service) as found:
        yield found

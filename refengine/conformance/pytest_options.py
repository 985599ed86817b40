"""Options of `pytest --pyargs refengine.conformance`, known to pytest by an entry point. Floor 7."""


def pytest_addoption(parser):
    group = parser.getgroup("refengine")
    group.addoption("--engine", default=None, metavar="MODULE:FUNCTION", help="makes a fresh engine of the refengine protocol")
    group.addoption("--vocab", type=int, default=64, help="ids 0..VOCAB-1 are fed to it (default %(default)s)")
    group.addoption("--longest", type=int, default=64, help="most tokens that it must hold (default %(default)s)")
    group.addoption("--histories", type=int, default=200, help="how many histories to try (default %(default)s)")
    group.addoption("--save-trace", default="refengine-trace.json", help="where to write what fails (default %(default)s)")

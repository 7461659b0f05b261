"""What a signal says, once and by one process."""

import os
import signal

import pytest

from diff_dalle.training.loop import SIGNAL, stop_on_signals


@pytest.mark.parametrize(
    ("tells", "said"), [(True, "\nFinishing this step and saving; Ctrl-C again to stop now\n"), (False, "")]
)
def test_ctrl_c_says_what_happens(tells, said, capfd):
    with stop_on_signals(tells) as stop:
        os.kill(os.getpid(), signal.SIGINT)
        assert stop.reason == SIGNAL + signal.SIGINT and capfd.readouterr().err == said
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)
    assert capfd.readouterr().err == ""


def test_another_signal_has_no_second_one(capfd):
    with stop_on_signals(True) as stop:
        os.kill(os.getpid(), signal.SIGTERM)
        os.kill(os.getpid(), signal.SIGUSR1)
        assert stop.reason == SIGNAL + signal.SIGTERM
    assert capfd.readouterr().err == "\nFinishing this step and saving\n"

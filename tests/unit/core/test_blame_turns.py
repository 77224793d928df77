"""Checks when suspects of an exit of Triton are loaded again. A load takes a second by default."""

import pytest

from adapter.core.blame import Work
from tests.unit.core.blame_player import HOUR, ONE_REQUEST, Exit, Player, loading


@pytest.fixture
def player() -> Player:
    return Player()


def test_suspects_do_not_wait_for_ever_new_loads(player: Player):
    """Other loads wait for the turns once the suspects have waited for ten seconds."""
    player.suspect("busy")
    player.start()
    player.ask_for(["busy"])
    for number in range(30):
        player.ask_for([f"model{number}"], load_seconds=2)
        player.run(1)
    assert player.began_after["model9"] == 9
    assert player.began_after["busy"] == 11
    assert player.began_after["model10"] == 13


def test_turn_ends_after_a_minute(player: Player):
    """A load of more than a minute is never charged, so it holds back no other charged model."""
    player.charge("other", times=2)
    player.charge("slow")
    player.start()
    player.ask_for(["slow"], load_seconds=300)
    player.ask_for(["other"])
    assert player.run(120) == {"slow": 5, "other": 65.25 + 10}


def test_late_suspect_waits_for_the_turn(player: Player):
    """Somebody asks for a suspect during a long turn of another: the suspect is released."""
    player.charge("slow")
    player.suspect("busy", "slow")
    player.start()
    player.ask_for(["slow"], load_seconds=30)
    player.run(12)
    player.ask_for(["busy"])
    player.run(12)
    assert player.began_after == {"slow": 5, "busy": 15}
    assert player.blame.turn == "slow"


def test_suspects_are_released_after_ten_seconds(player: Player):
    player.suspect(*"abcdefghi")
    player.start()
    player.ask_for("abcdefghi")
    began_after = player.run(20)
    assert [began_after[model] for model in "abcde"] == [0, 2, 4, 6, 8]
    assert [began_after[model] for model in "fghi"] == [10, 10, 10, 10]


def test_suspects_wait_twenty_seconds_at_most(player: Player):
    player.suspect(*"abcdefghi")
    player.start()
    player.ask_for(["slow"], load_seconds=60)
    player.ask_for("abcdefghi")
    assert max(player.run(30).values()) == 20


# Each row: the charges of a model, how long the load had taken that Triton broke off, and how long
# the next load waits after all others.
PAUSES = [(1, 0, 5), (1, 2.5, 5), (1, 3, 6), (2, 0, 10), (2, 5, 10), (2, 20, 40), (3, 0, 20)]


@pytest.mark.parametrize(("charges", "broken_seconds", "pause_seconds"), PAUSES)
def test_charged_model_loads_after_a_pause(
    player: Player, charges: int, broken_seconds: float, pause_seconds: float
):
    player.charge("a", times=charges - 1)
    at_work = {"a": loading(broken_seconds) if broken_seconds else ONE_REQUEST}
    player.play(Exit(HOUR, at_work, "a"))
    if charges == 3:
        player.now += HOUR  # the model is no longer given up
    player.start()
    player.ask_for(["a", "other"])
    assert player.run(60) == {"other": 0, "a": 1 + pause_seconds}


def test_load_broken_late_in_turn_waits(player: Player):
    """Triton broke it off too late for a charge, so the next load comes twice as late."""
    player.suspect("slow", "busy")
    player.play(Exit(20, {"slow": loading(20), "busy": Work(10)}, None, turn="slow"))
    player.start()
    player.ask_for(["slow", "busy"])
    assert player.run(90) == {"busy": 0, "slow": 42}


def test_others_are_free_after_a_charged_turn(player: Player):
    """The turn of a model explains the exit, so the others at work are not suspected."""
    player.suspect("killer", "busy")
    player.play(Exit(2, {"killer": loading(1), "busy": Work(10)}, "killer", turn="killer"))
    player.start()
    player.ask_for(["killer", "busy"])
    assert player.run(20) == {"busy": 0, "killer": 6}


def test_charged_model_waits_for_a_turn_once(player: Player):
    player.charge("a")
    player.start()
    player.ask_for(["a"])
    player.run(20)
    player.ask_for(["a"])
    assert player.run(1)["a"] == 20


def test_failed_load_ends_the_turn(player: Player):
    player.suspect("broken", "busy")
    player.start()
    player.ask_for(["broken", "busy"], load_seconds=5)
    player.run(2)
    player.fail_load("broken")
    assert player.run(10) == {"broken": 0, "busy": 2}


def test_given_up_model_does_not_load(player: Player):
    player.charge("a", times=3)
    player.start()
    player.ask_for(["a", "b"])
    assert player.run(590) == {"b": 0}
    assert player.run(60)["a"] == 598 + 20

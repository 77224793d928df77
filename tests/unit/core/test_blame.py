"""Checks which model an exit of Triton is charged to, and when that model is given up."""

import pytest

from adapter.core.blame import GivenUp, Requester, Work
from tests.unit.core.blame_player import HOUR, ONE_REQUEST, Exit, Player, loading

BUSY = Work(HOUR / 2)  # has had requests for half of an hour
DAY = 24 * HOUR
TEN_MINUTES = 600.0


@pytest.fixture
def player() -> Player:
    return Player()


# Each row: one exit after which no model has a charge yet.
FIRST_EXITS = {
    "nothing is at work": Exit(HOUR, {}, None, idle=("a",)),
    "at work for a tenth": Exit(100, {"a": Work(10)}, "a"),
    "at work for more than a tenth": Exit(100, {"a": Work(10.1)}, None),
    "a busy model beside": Exit(100, {"a": Work(10), "busy": Work(10.1)}, "a"),
    "two that are seldom at work": Exit(100, {"a": Work(1), "b": Work(10)}, None),
    "a load for half": Exit(20, {"a": loading(10)}, "a"),
    "a load for more than half": Exit(20, {"a": loading(10.1)}, None),
    "a load beside a seldom model": Exit(20, {"a": loading(10), "b": Work(1)}, "a"),
    "a long load beside a seldom model": Exit(20, {"a": loading(11), "b": Work(1)}, "b"),
    "two loads": Exit(20, {"a": loading(9), "b": loading(9)}, None),
    "two loads, one of them seldom": Exit(20, {"a": loading(9), "b": loading(2)}, "b"),
    "two loads, both seldom": Exit(HOUR, {"a": loading(9), "b": loading(2)}, None),
    "a load of a minute": Exit(HOUR, {"a": loading(60)}, "a"),
    "a load of more than a minute": Exit(HOUR, {"a": loading(60.1)}, None),
    "a minute's load beside a seldom model": Exit(HOUR, {"a": loading(61), "b": Work(1)}, "b"),
}


@pytest.mark.parametrize("row", FIRST_EXITS.values(), ids=FIRST_EXITS)
def test_exit_is_charged_to_one_or_none(player: Player, row: Exit):
    assert player.play(row).charged == row.charged


# Each row: one exit in a life in which `a` and `b` are suspects without a charge. They get their
# turns at once, as nothing else is loaded.
TURNS = {
    "from the start": Exit(3, {"a": loading(3), "b": Work(2)}, "a", turn="a"),
    "after ten seconds": Exit(10, {"a": loading(10)}, "a", turn="a"),
    "later": Exit(10.5, {"a": loading(10.5)}, None, turn="a"),
    "later, for half of the life": Exit(30, {"a": loading(15)}, "a", turn="a"),
    "later, for more than half": Exit(30, {"a": loading(15.1)}, None, turn="a"),
    "later, beside a seldom model": Exit(30, {"a": loading(29), "b": Work(1)}, None, turn="a"),
    "beside another load": Exit(30, {"a": loading(15), "b": loading(1)}, "a", turn="a"),
    "a load of a minute": Exit(60, {"a": loading(30), "b": Work(1)}, "a", turn="a"),
    "idle": Exit(3, {"b": Work(0.1)}, "b", turn="a", idle=("a",)),
    "idle, beside a load": Exit(20, {"b": loading(9)}, "b", turn="a", idle=("a",)),
}


@pytest.mark.parametrize("row", TURNS.values(), ids=TURNS)
def test_exit_is_charged_to_the_turn(player: Player, row: Exit):
    player.suspect("a", "b")
    assert player.play(row).charged == row.charged


# Each row: one exit in a life in which `a` has a charge. Its turn comes after five seconds.
CHARGED_TURNS = {
    "for half": Exit(8, {"a": loading(4)}, "a", turn="a"),
    "for more than half": Exit(8, {"a": loading(4.1)}, None, turn="a"),
    "for more than half, beside a seldom one": Exit(
        8, {"a": loading(4.1), "b": Work(0.1)}, None, turn="a"
    ),
    "for more than a minute": Exit(HOUR, {"a": loading(61)}, None, turn="a"),
}


@pytest.mark.parametrize("row", CHARGED_TURNS.values(), ids=CHARGED_TURNS)
def test_next_charge_needs_half_of_the_life(player: Player, row: Exit):
    player.charge("a")
    assert player.play(row).charged == row.charged


def test_turn_has_ended_a_second_after_load(player: Player):
    """Nothing waits any more, so nobody asks `Blame` until Triton exits."""
    player.suspect("a", "b")
    player.start()
    player.ask_for("a", load_seconds=1)
    player.run(1)
    player.now = player.started_at + 2
    assert player.exit({"a": Work(1), "b": Work(0.1)}).charged == "b"


# What happens in a row of lives; the last of these exits gives up the model, if any.
STORIES: dict[str, tuple[list[Exit], str | None]] = {
    "a load kills, beside a busy model": (
        [
            Exit(HOUR, {"killer": loading(1), "good": BUSY}, "killer"),
            Exit(9, {"killer": loading(1), "good": Work(3)}, "killer", turn="killer"),
            Exit(14, {"killer": loading(1), "good": Work(3)}, "killer", turn="killer"),
        ],
        "killer",
    ),
    "one of three loads kills, at the start": (
        [
            Exit(1, {"a": loading(1), "killer": loading(1), "b": loading(1)}, None),
            Exit(3, {"killer": loading(1)}, "killer", turn="killer", idle=("a",)),
            Exit(8, {"killer": loading(1)}, "killer", turn="killer", idle=("a", "b")),
            Exit(13, {"killer": loading(1)}, "killer", turn="killer", idle=("a", "b")),
        ],
        "killer",
    ),
    "each inference kills, beside a model that seldom has requests": (
        [
            Exit(HOUR, {"killer": ONE_REQUEST, "good": ONE_REQUEST}, None),
            Exit(5, {"killer": ONE_REQUEST}, "killer", turn="killer", idle=("good",)),
            Exit(8, {"killer": ONE_REQUEST}, "killer", turn="killer", idle=("good",)),
            Exit(13, {"killer": ONE_REQUEST}, "killer", turn="killer", idle=("good",)),
        ],
        "killer",
    ),
    "some inferences kill, once while another model is at work by accident": (
        [
            Exit(HOUR, {"killer": ONE_REQUEST}, "killer", idle=("good",)),
            Exit(90, {"killer": ONE_REQUEST, "good": ONE_REQUEST}, None),
            Exit(200, {"killer": ONE_REQUEST}, "killer", idle=("good",)),
            Exit(70, {"killer": ONE_REQUEST}, "killer", idle=("good",)),
        ],
        "killer",
    ),
    "two kill: exits by one say nothing of the other, which is away": (
        [
            Exit(HOUR, {"p": ONE_REQUEST, "q": ONE_REQUEST}, None),
            Exit(4, {"p": ONE_REQUEST}, "p", turn="p"),
            Exit(5, {"q": ONE_REQUEST}, "q"),
            Exit(9, {"p": ONE_REQUEST}, "p", turn="p"),
            Exit(9, {"q": ONE_REQUEST}, "q", turn="q"),
            Exit(14, {"p": ONE_REQUEST}, "p", turn="p"),
        ],
        "p",
    ),
    "an operator, and one busy model": (
        [Exit(HOUR, {"good": BUSY}, None), *[Exit(90, {"good": Work(60)}, None)] * 3],
        None,
    ),
    "an operator, twice by accident in a turn, then without the model": (
        [
            Exit(HOUR, {"good": BUSY, "other": BUSY}, None),
            Exit(8, {"good": Work(0.5), "other": Work(3)}, "good", turn="good"),
            Exit(12, {"good": Work(0.5), "other": Work(8)}, "good", turn="good"),
            Exit(9, {"other": Work(7)}, None),
            Exit(15, {"good": Work(0.5), "other": Work(9)}, "good"),
        ],
        None,
    ),
    "an operator every two minutes, and a load of five": (
        [
            Exit(HOUR, {"slow": loading(100), "good": BUSY}, None),
            *[Exit(118, {"slow": loading(115), "good": Work(60)}, None)] * 3,
        ],
        None,
    ),
    "Triton exits a second after each start": (
        [
            Exit(1, {"a": loading(1), "b": loading(1)}, None),
            Exit(1, {"a": loading(1)}, "a", turn="a"),
            Exit(1, {"b": loading(1)}, None),
            Exit(1, {"a": loading(1), "b": loading(1)}, None),
        ],
        None,
    ),
}


@pytest.mark.parametrize(("exits", "culprit"), STORIES.values(), ids=STORIES)
def test_culprit_is_given_up_at_last_exit(player: Player, exits: list[Exit], culprit: str | None):
    verdicts = [player.play(row) for row in exits]
    assert [verdict.charged for verdict in verdicts] == [row.charged for row in exits]
    given_up = [verdict.charged for verdict in verdicts if verdict.given_up]
    assert given_up == ([] if culprit is None else [culprit])
    assert (verdicts[-1].given_up is None) == (culprit is None)


# -- charges, and models that are given up ------------------------------------------------------


def pass_turn(player: Player, model: str) -> None:
    """Load a charged model alone, and let it serve for a second."""
    player.start()
    player.ask_for([model])
    assert model in player.run(60)
    player.run(2)


def test_four_charges_are_needed_after_a_turn(player: Player):
    player.charge("a")
    pass_turn(player, "a")
    player.exit({"a": ONE_REQUEST})
    assert player.blame.charges["a"].count == 2
    player.charge("a")
    assert player.find_given_up("a") is None
    player.charge("a")
    assert player.find_given_up("a") == GivenUp(player.now + TEN_MINUTES, exits=4)


def test_turn_without_a_charge_is_not_passed(player: Player):
    """Triton broke a long load off in its turn: the model has no charge, but is loaded last."""
    player.suspect("a")
    player.play(Exit(20, {"a": loading(20)}, None, turn="a"))
    pass_turn(player, "a")
    player.charge("a", times=3)
    assert player.find_given_up("a") is not None


def test_model_is_given_up_for_ten_minutes(player: Player):
    player.charge("a", times=3)
    player.now += TEN_MINUTES - 0.1
    assert player.find_given_up("a") is not None
    player.now += 0.1
    assert player.find_given_up("a") is None


# Each row: an exit after which the two charges of `a` are forgotten, or not.
EXITS_BETWEEN = {
    "loaded and idle, somebody charged": (Exit(HOUR, {"b": ONE_REQUEST}, "b", idle=("a",)), 0),
    "loaded and idle, nobody charged": (Exit(HOUR, {"b": BUSY}, None, idle=("a",)), 0),
    "away, nobody charged": (Exit(HOUR, {"b": BUSY}, None), 0),
    "away, somebody charged": (Exit(HOUR, {"b": ONE_REQUEST}, "b"), 2),
    "at work, nobody charged": (Exit(HOUR, {"a": BUSY}, None), 2),
    "at work, somebody charged": (Exit(HOUR, {"a": BUSY, "b": ONE_REQUEST}, "b"), 2),
    "a day later": (Exit(DAY - 2, {"a": Work(DAY / 2)}, None), 2),
    "more than a day later": (Exit(DAY - 1, {"a": Work(DAY / 2)}, None), 0),
}


@pytest.mark.parametrize(("row", "charges"), EXITS_BETWEEN.values(), ids=EXITS_BETWEEN)
def test_charges_are_forgotten_after_some_exits(player: Player, row: Exit, charges: int):
    """Triton is away for two seconds between two lives, which count for the day."""
    player.charge("a", times=2)
    assert player.play(row).charged == row.charged
    remaining = player.blame.charges.get("a")
    assert (remaining.count if remaining else 0) == charges


def test_expired_entries_do_not_pile_up(player: Player):
    for number in range(5):
        player.charge(f"model{number}", times=3)
    assert len(player.blame._given_up) == 1


# -- who may load a model that is given up ------------------------------------------------------


def test_platform_is_refused_while_given_up(player: Player):
    player.charge("a", times=3)
    assert player.request_load("a", Requester.PLATFORM) == GivenUp(
        player.now + TEN_MINUTES, exits=3
    )


def test_person_may_load_at_once(player: Player):
    player.charge("a", times=3)
    player.start()
    assert player.request_load("a", Requester.PERSON) is None
    player.ask_for("a")
    assert player.run(0) == {"a": 0}
    assert player.request_load("a", Requester.PLATFORM) is None

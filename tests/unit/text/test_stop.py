import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from colibri.errors import RequestError
from colibri.text import MAX_STOP_STRINGS, StopStrings

WORD = st.text(alphabet="ab", min_size=1, max_size=5)


def naive(text: str, stops: list[str]) -> tuple[str, str | None]:
    """Read letter by letter; the longest stop string that ends here ends the text."""
    for end in range(1, len(text) + 1):
        hits = [stop for stop in stops if text[:end].endswith(stop)]
        if hits:
            longest = max(hits, key=len)
            return text[: end - len(longest)], longest
    return text, None


@settings(max_examples=400, deadline=None)
@given(st.lists(st.text(alphabet="abc", max_size=6), max_size=10), st.lists(WORD, max_size=4))
def test_pieces_do_not_matter(pieces: list[str], stops: list[str]) -> None:
    expected, matched = naive("".join(pieces), stops)
    subject = StopStrings(stops)
    shown, seen = "", ""
    for piece in pieces:
        seen += piece
        emitted, stopped = subject.push(piece)
        shown += emitted
        assert stopped == (naive(seen, stops)[1] is not None)
        assert expected.startswith(shown)
    assert shown + subject.finish() == expected
    assert subject.matched == matched


@settings(max_examples=100, deadline=None)
@given(st.text(alphabet="abc", max_size=12), WORD)
def test_no_more_than_needed_is_held_back(text: str, stop: str) -> None:
    if stop in text:
        text = text[: text.index(stop)]
    shown, _ = StopStrings(stop).push(text)
    held = text[len(shown) :]
    assert stop.startswith(held)
    assert not any(stop.startswith(text[at:]) for at in range(len(shown)))


def test_a_stop_string_over_two_pieces() -> None:
    subject = StopStrings(["\n\nUser:"])
    assert subject.push("Yes.\n") == ("Yes.", False)
    assert subject.push("\nUs") == ("", False)
    assert subject.push("er: and more") == ("", True)
    assert subject.push("nothing is shown now") == ("", True)
    assert subject.finish() == ""
    assert subject.matched == "\n\nUser:"


def test_a_false_start_is_shown_in_the_end() -> None:
    subject = StopStrings("END")
    assert subject.push("the EN") == ("the ", False)
    assert subject.push("V") == ("ENV", False)
    assert subject.push("E") == ("", False)
    assert subject.finish() == "E"


@pytest.mark.parametrize("none", [None, "", []])
def test_nothing_to_stop_at(none: str | list[str] | None) -> None:
    if none == "":
        with pytest.raises(RequestError, match=r"stop\[0\] is ''"):
            StopStrings(none)
        return
    assert StopStrings(none).push("text") == ("text", False)


def test_what_cannot_be_a_stop_string() -> None:
    with pytest.raises(RequestError, match=r"stop\[1\] is ''"):
        StopStrings(["a", ""])
    with pytest.raises(RequestError, match=r"stop\[0\] is 5"):
        StopStrings([5])  # type: ignore[list-item]
    with pytest.raises(RequestError, match="holds 5 strings, at most 4"):
        StopStrings(["a"] * 5, limit=MAX_STOP_STRINGS)
    assert StopStrings(["a", "b"] * 20).push("xb") == ("x", True)

"""What the words around a call say about it: that it comes, that it is an example, or that a sentence only mentions it.

An explicit `<tool_call>` is an example only behind a sentence about the form of calls; any other call also behind one that
speaks of an example of anything, of how something is done or how it looks. Nothing is an example behind a sentence in
which the speaker acts.
"""

from __future__ import annotations

import re

from shared.tool_calls.source import Reading, Source

_NEAR = 200  # characters before a call that can say what it is
_HEADING = 32  # characters of the longest heading that announces an example
_COLONS = {":", "："}


def _any(*patterns: str) -> str:
    return f"(?:{'|'.join(patterns)})"


_FOR_EXAMPLE = _any(
    r"\b(?:for example|for instance|e\.g\.|zum Beispiel|z\. ?B\.|par exemple|por ejemplo|(?:ad|per) esempio|por exemplo|"
    r"bijvoorbeeld|na przykład|например)(?!\w)",
    "例如|比如|例えば|예를 들어",
)
_EXAMPLE = _any(
    r"\b(?:examples?|Beispiel(?:e|aufrufe?|anfrage)?|exemples?|ejemplos?|esempi[oi]?|exemplos?|voorbeeld(?:en)?|przykłady?|примеры?)\b",
    "示例|例子|예시",
    r"(?<!\w)例(?!\w)",
)
_CALL = r"\b(?:calls?|requests?|invocations?|format|syntax|template|tags?)\b"
_FORM = rf"(?:{_CALL}|\b(?:outputs?|responses?|body|JSON)\b)"
_SHAPE = r"(?:format|syntax|form|structure|shape|template)"
_LIKE_THIS = r"(?: (?:this|that|so|follows|the following))?"
_COLON = r"\W*[:：]\W{0,3}$"
_ABOUT_FORM = re.compile(
    _any(
        rf"^\W*{_FOR_EXAMPLE}.*",
        _FOR_EXAMPLE,
        rf"{_EXAMPLE}(?: \d+)?",
        rf"\b(?:example|sample) (?:of (?:[\w-]+ )?)?(?:[\w-]+ )?{_FORM}.*",
        r"\bhow to (?:call|invoke|(?:format|make|send|use|write) (?:[\w-]+ )?(?:calls?|functions?|requests?|tools?)\b).*",
        rf"(?:{_CALL} (?:[\w-]+ ){{0,6}}looks?(?: like| as)?|\bcall (?:[\w-]+ ){{0,4}}would be){_LIKE_THIS}",
        rf"{_FORM} (?:[\w-]+ ){{0,6}}(?:this|the following|the same) (?:[\w-]+ )?{_SHAPE}",
        r"^\W*(?:it|one)(?: [\w-]+)? looks? (?:like this|as follows)",
        rf"\b(?:the|this|following|expected) (?:[\w-]+ ){{0,3}}{_SHAPE} (?:is|looks)(?: (?:like|as))?{_LIKE_THIS}",
        rf"^\W*(?:here is|here's|this is) (?:the|an?) (?:[\w-]+ ){{0,2}}{_SHAPE}",
        rf"(?:\b(?:please|should|must)\b|^\W*(?:in|use)\b).*\b(?:this|the following) (?:[\w-]+ )?{_SHAPE}",
        r"\b(?:previous|earlier|last|failed|wrong) (?:[\w-]+ )?call was",
        rf"^\W*(?:(?:usage|{_SHAPE})(?: of (?:[\w-]+ ){{0,2}}{_CALL})?|(?:wrong|incorrect|bad|invalid)(?: {_FORM})?)",
    )
    + _COLON,
    re.IGNORECASE,
)
_LIKE_AN_EXAMPLE = re.compile(
    _any(
        rf"(?:{_EXAMPLE}|{_FOR_EXAMPLE}).*",
        rf"\blooks? like{_LIKE_THIS}(?: (?:in|as|for|when|with)\b.*)?",
        r"\b(?:how to|like this|would (?:look|be|call|write)|the (?:[\w-]+ ){0,3}(?:format|syntax|form) (?:is|would)|"
        rf"this {_SHAPE})\b.*",
        r"^\W*(?:right|correct|good|valid)",
    )
    + _COLON,
    re.IGNORECASE,
)
_EXAMPLE_HEADING = re.compile(rf"\W*{_EXAMPLE}(?: (?:[\w-]+ )?{_FORM})?(?: \d+)?[*_#\s]*", re.IGNORECASE)
_SENTENCE_END = re.compile(r"(?<=\w\w)[.!?]\s+(?=[A-Z])|[。！？]")
_FIRST_PERSON = re.compile(r"\b(?:I|my|we|let(?: me| us|'s)|ich|wir|je|j'|nous|voy|vamos|я|мы)\b|[我私]", re.IGNORECASE)
_NOT_NOW = re.compile(
    r"\b(?:I|we)(?:'d\b| (?:\w+ )?(?:would|could|might|should have|had|did|was|wrote|sent|ran|used|called|tried|made|"
    r"never|cannot|can't|don't|won't|(?:can|do|will|should|must) not)\b)",
    re.IGNORECASE,
)
_ACTS_AT_ONCE = re.compile(
    r"\blet(?: me| us|'s)\b|\b(?:I|we)(?:'ll| will| need| must| have to| want| first| now|(?:'m| am|'re| are) going)\b(?! not)",
    re.IGNORECASE,
)
_ACTING = re.compile(
    r"\W*(?:(?:first|next|now|ok|okay|so|sure|then)\b\W*)*"
    r"(?:calling|checking|executing|fetching|getting|inspecting|looking|querying|reading|running|searching|trying)\b",
    re.IGNORECASE,
)
_ANNOUNCED = re.compile(
    r"^\W{0,4}(?:(?:tool|function)s?(?:[ _]calls?)?|call|action|json)\W{0,4}:\W{0,3}$|"
    r"\b(?:here is|here's|this is) (?:the|my|a) (?:\w+ ){0,2}(?:call|request|query|JSON)\W{0,4}:\W{0,3}$|"
    r"\b(?:I'll|I will|I'm going to|let me|let's|calling)\b[^|`\"]*[.:!]\s+$",
    re.IGNORECASE,
)
_LOG = re.compile(r"\W?(?:(?:[A-Z]+\W+)?(?:\d{4}-\d\d-\d\d[ T])?\d\d:\d\d:\d\d|(?:DEBUG|INFO|TRACE|WARN|WARNING)\b)")
_NEXT_STEPS = ("then", "and then", "next", "dann", "und dann", "puis", "luego", "然后", "接着")
_PROSE_END = re.compile(r"(?:[.:!?…]\W{0,3}|```)$")
_CODE_LINE = re.compile(r"\s|[\w.]+(?: = |\()")


def is_specimen(text: str, at: int, *, explicit: bool) -> bool:
    """Whether a call is only shown: in a line of a log, which begins with a time or a level, or as an example."""
    words, whole = _words_before(text, at)
    return (whole and bool(_LOG.match(words))) or is_example(text, at, explicit=explicit)


def is_example(text: str, at: int, *, explicit: bool) -> bool:
    """Whether the line before a call says that it is an example."""
    line = text[max(0, at - _NEAR) : at].rstrip().rpartition("\n")[2]
    if _COLONS.isdisjoint(line[-4:]):
        return len(line) <= _HEADING and _EXAMPLE_HEADING.fullmatch(line) is not None
    sentence = _SENTENCE_END.split(line)[-1]
    if explicit:
        return bool(_ABOUT_FORM.search(sentence)) and not _speaker_acts(sentence)
    example = _ABOUT_FORM.search(sentence) or _LIKE_AN_EXAMPLE.search(sentence)
    return bool(example) and not _ACTS_AT_ONCE.search(sentence)


def _speaker_acts(sentence: str) -> bool:
    return bool(_FIRST_PERSON.search(sentence)) and not _NOT_NOW.search(sentence)


def is_announced(text: str, at: int) -> bool:
    """Whether the words before it on its line say that a call comes."""
    words, whole = _words_before(text, at)
    return whole and not words.lstrip().startswith(("- ", "* ")) and bool(_ANNOUNCED.search(words))


def stands_in_sentence(text: str, start: int, at: int) -> bool:
    """Whether the words before it on its line need more words, and do not say that the speaker acts. `start` is where the last
    call ended: on the line of a call there are further calls."""
    words, _ = _words_before(text, at)
    last = words.rstrip()[-1:]
    if start > at - len(words) or not (last.isalnum() or last in (",", "，", "、")):
        return False
    sentence = _SENTENCE_END.split(words)[-1]
    return not _speaker_acts(sentence) and not _ACTING.match(sentence)


def _words_before(text: str, at: int) -> tuple[str, bool]:
    """The line up to a place, and whether that is all of it."""
    _, newline, words = text[max(0, at - _NEAR) : at].rpartition("\n")
    return words, bool(newline) or at < _NEAR


def goes_on(source: Source, at: int) -> Reading[bool]:
    """Whether the sentence goes on behind a call, on the same line, and not with a next step."""
    at = yield from source.line_spaces(at)
    for step in _NEXT_STEPS:
        if (yield from source.holds(step, at)):
            return False
    char = yield from source.char(at)
    return bool(char) and (char in ".,;:!?，；：、。" or (char.isalpha() and not char.isupper()))


def ends_prose(text: str, start: int, at: int) -> bool:
    """Whether the text between two places is empty or ends as a sentence does, not as a line of a program."""
    line = text[max(start, at - _NEAR) : at].rstrip().rpartition("\n")[2]
    return not line or bool(_PROSE_END.search(line)) or (line.endswith(")") and not _CODE_LINE.match(line))

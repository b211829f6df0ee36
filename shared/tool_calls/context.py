"""What the words around a call say about it: that it is made, or that it is only shown, refused or reported.

A few rules look at the last clause before the call. If it refuses the call or speaks of it in the past, the call is not
made. Else it is made where the speaker acts, and not where the sentence speaks of examples or of the form of calls. In
the middle of a sentence, a call is only mentioned unless the speaker acts.
"""

from __future__ import annotations

import re

from .text import LINE_SPACE, Text

_NEAR = 200  # characters before a call that can say what it is
_HEADING = 32  # characters of the longest heading that needs no colon

_VERB = r"(?:run|running|execut|call|send|mak|issu|perform|us|do|invok|submit|work|allow|permit|need)(?:e|es|ed|ing)?"
_DONE = r"(?:ran|executed|called|sent|issued|performed|used|tried|invoked|submitted|queried)"
_CALL = r"(?:calls?|quer(?:y|ies)|requests?|attempts?|statements?|commands?|invocations?)"
_IT = rf"(?:{_CALL}|this|that|it)"
_REFUSED = r"(?:refus|refrain|declin|reject|forbid|prevent|skip|block|prohibit|den[iy]|danger|unsafe)\w*"
_NOT_MADE = re.compile(
    r"(?:\b(?:not|never|no|nor|without|cannot|avoid|against|unable|stop(?:ped)?)|n't)"
    rf"(?: (?:be able to|[\w-]+)){{0,2}} {_VERB}\b"
    r"|(?:\b(?:not|never|no|cannot)|n't)\W*$|^\W*(?:do not|don't|never|already)\b"
    rf"|\b(?:I|we) (?:[\w-]+ ){{0,4}}{_REFUSED}|{_REFUSED} (?:this|that|the|it|me|us|my|your)\b|\b{_CALL} failed\b"
    rf"|^\W*{_REFUSED} {_IT}\W*$|\b{_REFUSED}\W*$|拒绝|拒否"
    rf"|\b{_IT}(?: [\w-]+){{0,3}} (?:(?:is|would be)(?: [\w-]+)? {_REFUSED}|was\b|were\b)"
    rf"|\b{_IT}(?: [\w-]+){{0,3}} (?:has|had|have)(?: [\w-]+)? been\b"
    rf"|\b(?:I|we|you|it|already|just|previously|earlier|was|were|been|had|have|has)(?:'ve|'d)?(?: [\w-]+)? {_DONE}\b"
    rf"|\b(?:I|we|already|just)(?:'ve|'d)?(?: [\w-]+){{0,2}} (?:made (?:[\w-]+ )?{_IT}|did(?: {_IT})?\W*$)"
    r"|\b(?:was|were|\w+ed by)\W*$"
    rf"|\b(?:made|did|{_DONE}) (?:[\w-]+ ){{0,3}}(?:earlier|before|previously|ago|last time)\W*$"
    r"|\b(?:had|was|were) (?:planned|meant|going|about|supposed|intended) to\b"
    r"|(?:\b(?:already|been|had|have|has|was|were)|'ve)(?: (?:already|just|once|been))* run\b"
    r"|\b(?:I|we)(?:'d| would| could have| should have)\b(?! like| love)",
    re.IGNORECASE,
)
_PAST = r"(?!(?:creat|prepar|construct|formulat|generat|correct|fix|updat|revis|modifi)ed)\w+ed(?<!need)(?<!needed)"
# Outside <tool_call>, one such word in the main clause is enough: a missed call costs a turn, a wrong one runs.
_DOUBTFUL = re.compile(
    r"(?:\b(?:not|never|neither|nor|nobody|no one|cannot|would(?! like| love)|might|imagine|suppose|already|ago)|n't)\b"
    r"|\bhypothetical(?:ly)?\b"
    r"|^\W*(?:if|unless|under no|instead of|rather than)\b"
    rf"|\b(?:I|we|got)(?: \w+ly)? {_PAST}\b"
    rf"|\b(?:the|an?|my|last time)(?: (?!is\b|are\b|be\b)[\w-]+){{1,3}} (?:{_PAST}|wrote|said|sent|ran|made)"
    r"(?: (?:it|this|that|for|with))?\W*$"
    r"|\b(?:one|you|someone|anyone|people) (?:can|could|may)\b|\billustrat\w+"
    # Negation, refusal and the perfect tense of other languages.
    r"|\b(?:nicht|niemals|nie|keine?n?|schon|bereits|habe|haben|hatte|hat|wurden?|weiger\w*|ne|pas|jamais|déjà|j'ai|avons"
    r"|je refuse|nunca|ya|no (?:voy|vamos|puedo|podemos|debo|se debe)|he \w+do|me niego|não|já|recuso|non(?!-)|mai|già"
    r"|rifiuto|niet|nooit|geen|не|уже)\b"
    r"|[不没](?:会|能|要|应|可|该|想|得|执行|运行|调用|查询)|已经|已(?:执行|运行|调用|查询)|(?:ません|ない|した)\W*$",
    re.IGNORECASE,
)
_SUBORDINATE = re.compile(r"(?<=\w) (?:that|which|who|whose|where|whether|if)\b", re.IGNORECASE)
_ACTS = re.compile(r"\b(?:I|we|let|ich|wir|je|nous)\b|^\W*(?:to|first|next|now|then)\b|[我私]", re.IGNORECASE)
_EXAMPLE = (
    r"(?:\b(?:examples?\b|e\.g\.|for instance|sample\b)"
    r"|\b(?:beispiel|exempl|ejemplo|esempi|voorbeeld|przykład|пример|например)"
    r"|例如|示例|例子|例えば|(?<!\w)例(?!\w))"
)
_SHOWN = re.compile(
    rf"{_EXAMPLE}|\b(?:format|syntax|template|structure|shape|usage)\b|\bhow (?:to (?:call|invoke|send)|an? {_CALL})\b"
    rf"|\b(?:previous|earlier|last|failed|wrong|bad|invalid|incorrect|error)(?: [\w-]+)* {_CALL}\W*$"
    rf"|\b{_CALL}\b.*\blooks?\b"
    r"|^\W*(?:right|correct|good|valid|wrong|incorrect|bad|invalid)\W*$",
    re.IGNORECASE,
)
_LOOSELY_SHOWN = re.compile(
    r"\bwould\b|\bhow to\b|\blike (?:this|that|so|follows)\b|\b(?:shows?|says?|suggests?|recommends?|contains?)\b",
    re.IGNORECASE,
)
_HEADING_OF_EXAMPLE = re.compile(rf"\W*{_EXAMPLE}\w*(?: [\w-]+)?(?: \d+)?\W*", re.IGNORECASE)
_LABEL = re.compile(r"\b(?:call|function|tool|action|query|request|json)s?\W{0,4}:\W*$", re.IGNORECASE)
_DEMONSTRATIVE = re.compile(r"\b(?:this|that|these|the following)\b", re.IGNORECASE)
_LOG = re.compile(
    r"\W?(?:(?:[A-Z]+\W+)?(?:\d{4}-\d\d-\d\d[ T])?\d\d:\d\d:\d\d|(?:DEBUG|INFO|TRACE|WARN|WARNING|ERROR)\b)"
)
_SENTENCE_END = re.compile(r"(?<=\w\w)[.!?]\s+(?=[A-Z])|[。！？]")
_CLAUSE_END = re.compile(r"[,;，；]|\s[–—-]\s|\b(?:but|so|and|because|then)\b", re.IGNORECASE)
_PROSE_END = re.compile(r"(?:[.:!?…]\W{0,3}|```)$")
_CODE_LINE = re.compile(r"\s|[\w.]+(?: = |\()")


def is_only_shown(text: Text, since: int, at: int, *, explicit: bool) -> str:
    """What the words before a place say of a call there.

    "yes" for a log, a refusal, a report or an example; "in a sentence" if they need more words and nobody acts in them;
    else "". `since` is where the call before it ended.
    """
    words = text.known[max(0, at - _NEAR) : at].rpartition("\n")[2]
    if words.strip() and _LOG.match(words):
        return "yes"
    further = since > at - len(words)  # on the line of a call there are further calls
    line = text.known[max(0, since, at - _NEAR) : at].rstrip().rpartition("\n")[2].replace("’", "'").strip(" *_")
    colon = line.endswith((":", "："))
    if not (colon or words.strip() or _DEMONSTRATIVE.search(line)):
        return "yes" if len(line) <= _HEADING and _HEADING_OF_EXAMPLE.fullmatch(line) else ""
    before, sentence = ["", *_SENTENCE_END.split(line)][-2:]
    clause = _CLAUSE_END.split(sentence)[-1]
    if not (colon or words.strip()):
        return "yes" if _DEMONSTRATIVE.search(clause) and _NOT_MADE.search(clause) else ""
    if _NOT_MADE.search(clause) or (not explicit and _DOUBTFUL.search(_SUBORDINATE.split(clause)[0])):
        return "yes"
    if not explicit and colon and not _ACTS.search(sentence) and _NOT_MADE.search(before):
        return "yes"  # the sentence before refuses, and nobody acts since
    if _ACTS.search(sentence) or (colon and not re.search(r"\w", clause)):
        return ""
    if colon:
        return "yes" if _SHOWN.search(sentence) or (not explicit and _LOOSELY_SHOWN.search(sentence)) else ""
    return "in a sentence" if not further and (line[-1:].isalnum() or line[-1:] in (",", "，", "、")) else ""


def is_announced(text: Text, at: int) -> bool:
    """Whether the words before it on its line say that a call comes."""
    words = text.known[max(0, at - _NEAR) : at].rpartition("\n")[2]
    if words.lstrip().startswith(("- ", "* ", "|", ">")):
        return False
    return bool(_LABEL.search(words) or (re.search(r"[.:!]\s+$", words) and _ACTS.search(words)))


def sentence_behind(text: Text, at: int) -> str:
    """What stands behind a place on its line: "new" sentence, the "same" sentence, or "" for anything else."""
    at = text.run(LINE_SPACE, at)
    char = text.char(at)
    if char.isupper():
        return "new" if text.char(at + 1).islower() or text.char(at + 1) in (" ", "'") else ""
    next_step = any(text.holds(step, at) for step in ("then", "and then", "next"))
    return "same" if not next_step and char and (char.isalpha() or char in ".,;:!?，；：、。") else ""


def ends_prose(text: Text, since: int, at: int) -> bool:
    """Whether the text between two places is empty or ends as a sentence does, not as a line of a program."""
    line = text.known[max(since, at - _NEAR) : at].rstrip().rpartition("\n")[2]
    return not line or bool(_PROSE_END.search(line)) or (line.endswith(")") and not _CODE_LINE.match(line))

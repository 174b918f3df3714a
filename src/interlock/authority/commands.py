"""Finds the programs that a command line would start, by the grammar that shells share.

Theory of operation. A reader goes through the text once, as a shell's own lexer does: quotes, escapes, substitutions,
here-documents and comments decide where words begin and end, operators and reserved words decide which of them begins a
command. Redirections and assignments before a command do not hide it; the content of `$(…)`, of backticks or of a
here-document that is expanded is read the same way. Programs that start others (`env`, `xargs`, `find`, `sh -c`) count
with every word they are given, and the argument of a shell is read as a command once more.

Shells differ, and it is unknown which one will read the text. Where the readings of bash and of the plain POSIX shell
differ, the result contains both; `&>f x` starts `x` in one of them. So it contains too much rather than too little.
What cannot be known from the text is refused (E3206) rather than guessed: a program that is named by an expansion
(`$x`, `/bin/r?`, `{rm,x}`), an open quote, and the few forms in which two shells disagree about where a quote ends.

What a program does by itself is beyond any grammar: `python -c`, `awk`, `make` and scripts start what they like.
"""

from __future__ import annotations

import os
from typing import NoReturn

from interlock.core.errors import Failure
from interlock.core.expressions import expression
from interlock.core.record import NamedTuple

MAX_DEPTH = 16

_BREAKS = frozenset(" \t\n;&|()<>")
_OPERATORS = frozenset("\n;&|()<>#")
_ASSIGNMENT = expression(r"[^\W\d]\w*(?:\[[^\]]*\])?\+?=")
_DESCRIPTOR = expression(r"[0-9]+\Z|\{\w+\}\Z")
_VARIABLE = expression(r"\w+|[@*#?$!-]")
# Arithmetic in every shell: balanced, with no expansions except plain variables.
_ARITHMETIC = expression(r"\$\(\((?:[^()'\"`\\$]|\$\w|\((?:[^()'\"`\\$]|\$\w)*+\))*+\)\)")
_SEPARATOR = expression(r"[;&|]+")
_NO_ARGUMENTS = expression(r"\([ \t]*\)")
_NOT_IN_NAMES = expression(r"[^\w./+~-]+")

# Another command begins after these.
_OPENING = frozenset(
    {"{", "}", "!", "if", "then", "else", "elif", "fi", "do", "done", "while", "until", "esac", "coproc", "function",
     "end", "begin", "and", "or", "not", "always", "]]"}
)  # fmt: skip
_LOOPS = frozenset({"for", "select", "foreach"})
# Programs that may start their arguments.
_STARTERS = frozenset(
    {"builtin", "busybox", "chroot", "chrt", "command", "doas", "env", "exec", "find", "flock", "ionice", "nice",
     "nocorrect", "noglob", "nohup", "nsenter", "parallel", "repeat", "setsid", "stdbuf", "strace", "sudo",
     "systemd-run", "taskset", "time", "timeout", "toybox", "unbuffer", "unshare", "xargs"}
)  # fmt: skip
# Programs whose arguments are read by a shell; for shells themselves, only behind `-c`.
_EVALUATORS = frozenset({"eval", "runuser", "script", "ssh", "su", "trap", "watch"})
_SHELLS = frozenset({"ash", "bash", "dash", "fish", "ksh", "mksh", "rbash", "sh", "zsh"})


def programs(command: str, where: str = "command") -> list[str]:
    """Return the programs that a command line would start, as written and by base name; E3206 if that
    is undecidable.
    """
    return list(read_command(command, where).programs)


def read_command(command: str, where: str = "command") -> Reading:
    """Return the programs that a command line would start, and every word in it; E3206 if that is undecidable."""
    reading = Reading()
    _Reader(command, where, reading, 0).read()
    return reading


class Word(NamedTuple):
    """A word as written, as its command would receive it, and whether that is known beforehand.

    A `fixed` word is the same text in every shell. Patterns, braces, variables and substitutions are not.
    """

    raw: str
    text: str
    fixed: bool
    # Whether it may be the program that is started.
    starts: bool = False


class Reading:
    """Everything that was read in a command line, including scripts for other shells."""

    def __init__(self) -> None:
        self.programs: dict[str, None] = {}
        self.started: set[str] = set()  # the same, but as they are written only
        self.words: list[Word] = []
        # Words of the line itself, and whether there is anything else in it: operators, redirections, comments.
        self.line: list[Word] = []
        self.plain = True

    @property
    def simple(self) -> list[str] | None:
        """The words of a line that is one command and nothing else; None for any other."""
        if not self.plain or not self.line or not all(word.fixed for word in self.line):
            return None
        return None if _ASSIGNMENT.match(self.line[0].raw) else [word.text for word in self.line]


class _Here(NamedTuple):
    """A here-document that begins at the next line."""

    end: str
    tabs: bool
    expands: bool


class _State:
    """The reader's state within a list of commands."""

    def __init__(self) -> None:
        self.depth = self.cases = 0
        self.array = False  # what follows up to `)` are the values of an array
        self.arithmetic = False  # there was a `((`, within which no comment begins
        self.pattern = False  # what follows up to `)` is compared, not run
        self.begin()

    def begin(self, mode: str = "") -> None:
        """A command begins or, in some reading, goes on."""
        self.start = self.sure = True  # the next word begins a command; surely, or only in some reading
        self.loose = False  # the next word may belong to the one before it; the command's name may still follow
        self.head = ""
        self.mode = mode  # how to read the words of this command: "words", "shell", "script" behind `-c`, or nothing
        self.bare = True  # of these, none was anything but an option yet
        self.operand = ""  # the redirection whose operand is next


# many methods: a recursive-descent reader of the shell grammar, with one method per rule
class _Reader:
    """Reads one text once, from left to right."""

    def __init__(self, text: str, where: str, reading: Reading, depth: int) -> None:
        self._text = text
        self._where = where
        self._reading = reading
        self._depth = depth
        self._at: int = 0
        self._heres: list[_Here] = []
        if "\0" in text:
            self._refuse("holds a character that ends it for some shells and not for others")
        if depth > MAX_DEPTH:
            self._refuse("is nested too deeply")

    def read(self, *, nested: bool = False) -> None:
        """Record the programs of a list of commands: all of the text, or up to the `)` of a substitution."""
        state, text = _State(), self._text
        while self._at < len(text):
            character = text[self._at]
            if character in _OPERATORS:
                self._reading.plain = False
            if state.array and character in ";&|<>(":
                self._refuse("has an operator within an array, after which shells go on differently")
            if character in " \t" or text.startswith("\\\n", self._at):
                self._at += 1 if character != "\\" else 2
            elif character == "#":
                if state.arithmetic or text[self._at - 1 : self._at] == ")":
                    self._refuse("has a `#` that is a comment to some shells and not to others")
                end = text.find("\n", self._at)
                self._at = len(text) if end < 0 else end
            elif character == "\n":
                self._at += 1
                self._here_documents()
                state.begin()
            elif separator := _SEPARATOR.match(text, self._at):
                self._at = separator.end()
                state.pattern = state.pattern or (state.cases > 0 and separator[0][:2] in (";;", ";&"))
                state.begin()
            elif character == "(":
                state.arithmetic = state.arithmetic or text[self._at - 1 : self._at] == "("
                state.array = text[self._at - 1 : self._at] == "="
                self._at += 1
                state.depth += 1
                state.begin(state.mode if state.array else "")
            elif character == ")":
                self._at += 1
                if self._heres:
                    self._refuse("ends before its here-document begins")
                if nested and state.depth == 0:
                    return
                self._close(state)
            elif character in "<>":
                state.operand = self._redirection()
                if state.arithmetic and state.operand in ("<<", "<<-"):
                    self._refuse("has a `<<` that is a here-document to some shells and a number's shift to others")
            else:
                self._take(self._word(), state, nested=nested)
        if nested:
            self._refuse("has an open substitution")

    def _close(self, state: _State) -> None:
        """Behind `)`: a command, or the rest of an array's assignment."""
        state.depth -= 1
        state.begin(state.mode if state.array else "")
        state.array = False
        state.sure, state.pattern = state.pattern, False
        state.loose = self._at < len(self._text) and self._text[self._at] not in _BREAKS

    # Words and what they mean

    def _take(self, word: Word, state: _State, *, nested: bool) -> None:
        follows = self._text[self._at : self._at + 1]
        if follows in ("<", ">") and _DESCRIPTOR.match(word.raw):
            return
        self._keep(word, starts=state.start and not state.operand, opens=follows == "(")
        if state.operand:
            operand, state.operand = state.operand, ""
            state.sure = False
            state.loose = state.loose or word.raw == "!"  # `>! f` in zsh
            if operand == "<<<" and not _SHELLS.isdisjoint(self._reading.programs):
                self._script(word)
            if operand.startswith("<<") and operand != "<<<":
                self._announce(word, operand)
        elif word.raw in ("{", "}", "]]") or (word.raw == "do" and state.head in _LOOPS):
            state.begin()
        elif state.start:
            if state.mode:
                self._given(word, state)
            self._first(word, state, nested=nested)
        elif state.head == "case" and word.raw == "in" and state.cases:
            state.begin()
            state.pattern = True
        elif state.mode:
            self._given(word, state)

    def _keep(self, word: Word, *, starts: bool, opens: bool) -> None:
        """Record a word. One that goes on with a bracket is a pattern to some shells."""
        fixed = word.fixed or word.raw in ("[", "[[")
        if opens and not starts and not _ASSIGNMENT.match(word.raw):
            fixed = False
        noted = word._replace(fixed=fixed, starts=starts)
        self._reading.words.append(noted)
        if self._depth == 0:
            self._reading.line.append(noted)

    def _first(self, word: Word, state: _State, *, nested: bool) -> None:
        """Handle a word where a command may begin."""
        sure, state.sure = state.sure, False
        rest = self._text[self._at : self._at + 200].lstrip(" \t")
        if state.pattern and word.raw != "esac" and not word.fixed and rest[:1] in (")", "|"):
            return
        if _ASSIGNMENT.match(word.raw):
            return
        if not word.fixed and word.raw not in ("[", "[["):
            self._refuse("names a program by an expansion, which no rule can read; write its name out")
        if self._text[self._at : self._at + 1] == "(" and not _NO_ARGUMENTS.match(self._text, self._at):
            self._refuse("names a program by a pattern, which no rule can read; write its name out")
        self._note(word.text)
        if word.raw in _OPENING:
            state.begin()
            state.loose = word.raw in ("function", "coproc")
            if word.raw == "esac":
                state.cases, state.pattern = max(0, state.cases - 1), False
        elif state.loose and word.raw != "case" and word.raw not in _LOOPS:
            state.loose, state.mode = False, _mode(word.text) or state.mode
        elif not word.text.startswith("-"):  # `time -p x`
            state.start = state.loose = False
            state.head = word.raw
            state.mode = _mode(word.text) or state.mode
            state.bare = _begins_with_program(word.text)
            if word.raw == "case" and sure:
                if nested:
                    self._refuse("has a `case` within a substitution, where shells disagree about its end")
                state.cases += 1

    def _given(self, word: Word, state: _State) -> None:
        """Handle an argument of a program that starts others."""
        option, assignment = word.text.startswith(("-", "+")), _ASSIGNMENT.match(word.raw)
        if state.mode == "words" and state.bare and not (word.fixed or assignment):
            self._refuse("names a program by an expansion, which no rule can read; write its name out")
        if not assignment:
            self._note(word.text)
            for piece in _NOT_IN_NAMES.split(word.text):
                self._note(piece)
            state.bare = state.bare and (option or word.text.isdigit())
        if word.raw != "{}" and (state.mode in ("shell", "-c") or (state.mode == "script" and word.fixed)):
            _Reader(word.text, self._where, self._reading, self._depth + 1).read()
        if state.mode == "script" and option and "c" in word.text and not word.text.startswith("--"):
            state.mode = "-c"
        elif state.mode == "-c" and not option:
            state.mode, state.bare = "words", False
        elif state.mode == "words" and _mode(word.text):
            state.mode, state.bare = _mode(word.text), _begins_with_program(word.text)

    def _script(self, word: Word) -> None:
        """Read a word that is the input of a shell."""
        if not word.fixed:
            self._refuse("gives a shell an expansion to run, which no rule can read; write it out")
        _Reader(word.text, self._where, self._reading, self._depth + 1).read()

    def _note(self, name: str) -> None:
        self._reading.started.add(name)
        for shown in (name, os.path.basename(name), name.lstrip("=")):
            if shown:
                self._reading.programs[shown] = None

    # Redirections

    def _redirection(self) -> str:
        """The operator, without the operand that follows it."""
        text, begin = self._text, self._at
        for operator in ("<<<", "<<-", "<<", "<>", "<&", ">>", ">&", ">|", "<", ">"):
            if text.startswith(operator, begin):
                break
        self._at = begin + len(operator)
        if text.startswith("\\\n", self._at):
            self._refuse("breaks a line within a redirection")
        if operator in ("<&", ">&") and text.startswith("-", self._at):
            self._at += 1
            return ""
        return operator

    def _announce(self, word: Word, operator: str) -> None:
        if "$" in word.raw or "`" in word.raw:
            self._refuse("has a here-document whose end is an expansion")
        plain = not set("'\"\\").intersection(word.raw)
        self._heres.append(_Here(word.text, operator == "<<-", plain))

    def _here_documents(self) -> None:
        """Skip the here-documents that begin here, and read what is expanded in them."""
        heres, self._heres = self._heres, []
        for here in heres:
            begin = self._at
            end = begin
            while self._at < len(self._text):
                end = self._at
                line, joined = self._line(here)
                if line == here.end:
                    if joined:
                        self._refuse("breaks the line that ends a here-document")
                    break
                end = self._at
            if not _SHELLS.isdisjoint(self._reading.programs):
                _Reader(self._text[begin:end], self._where, self._reading, self._depth + 1).read()
            if here.expands:
                _Reader(self._text[begin:end], self._where, self._reading, self._depth + 1)._expanded()

    def _line(self, here: _Here) -> tuple[str, bool]:
        """Return the next line of a here-document. Where it is expanded, lines that end with a backslash are joined."""
        pieces: list[str] = []
        while True:
            end = self._text.find("\n", self._at)
            line = self._text[self._at :] if end < 0 else self._text[self._at : end]
            self._at = len(self._text) if end < 0 else end + 1
            line = line.lstrip("\t") if here.tabs else line
            goes_on = here.expands and (len(line) - len(line.rstrip("\\"))) % 2 == 1
            if pieces and line == here.end:
                self._refuse("breaks the line that ends a here-document")
            pieces.append(line[:-1] if goes_on else line)
            if not goes_on or end < 0:
                return "".join(pieces), len(pieces) > 1

    def _expanded(self) -> None:
        """Read what would be expanded in text that is otherwise data."""
        while self._at < len(self._text):
            character = self._text[self._at]
            if character == "\\":
                self._at += 2
            elif character == "$":
                self._dollar(quoted=True)
            elif character == "`":
                self._backticks(quoted=True)
            else:
                self._at += 1

    # The inside of words

    def _word(self) -> Word:
        text, raw, parts, fixed = self._text, list[str](), list[str](), True
        while self._at < len(text) and text[self._at] not in _BREAKS:
            begin, character = self._at, text[self._at]
            if text.startswith("\\\n", begin):
                self._at += 2
                continue
            if character == "\\":
                self._at = min(begin + 2, len(text))
                parts.append(text[begin + 1 : begin + 2] or "\\")
            elif character == "'":
                self._at = self._closing("'", begin + 1) + 1
                parts.append(text[begin + 1 : self._at - 1])
            elif character in '"$`':
                part, known = self._special(character)
                parts.append(part)
                fixed = fixed and known
            else:
                self._at += 1
                parts.append(character)
                fixed = fixed and character not in "*?[{}"
            raw.append(text[begin : self._at])
        written = "".join(raw)
        return Word(written, "".join(parts), fixed or written in ("{", "}"))

    def _special(self, character: str) -> tuple[str, bool]:
        if character == '"':
            self._at += 1
            return self._quoted()
        if character == "`":
            return self._backticks(quoted=False)
        return self._dollar(quoted=False)

    def _quoted(self) -> tuple[str, bool]:
        """Read the rest of a text in double quotes. Expansions in it stay as written."""
        text, parts, fixed = self._text, list[str](), True
        while True:
            if self._at >= len(text):
                self._refuse("is a command with an open quote")
            character = text[self._at]
            if character == '"':
                self._at += 1
                return "".join(parts), fixed
            if character == "\\":
                escaped = text[self._at + 1 : self._at + 2]
                parts.append("" if escaped == "\n" else escaped if escaped in '$`"\\' else f"\\{escaped}")
                self._at += 2
            elif character in "$`":
                part, known = self._dollar(quoted=True) if character == "$" else self._backticks(quoted=True)
                parts.append(part)
                fixed = fixed and known
            else:
                parts.append(character)
                self._at += 1

    def _dollar(self, *, quoted: bool) -> tuple[str, bool]:
        text, begin = self._text, self._at
        follows = text[begin + 1 : begin + 2]
        if text.startswith("\\\n", begin + 1) or follows == "[":
            self._refuse("has a `$` that shells read differently")
        if arithmetic := _ARITHMETIC.match(text, begin):
            self._at = arithmetic.end()
        elif follows == "(":
            self._at += 2
            self._substitution()
        elif follows == "{":
            self._at += 2
            self._parameter()
        elif follows == "'" and not quoted:
            end = self._closing("'", begin + 2)
            part = text[begin + 2 : end]
            if part.endswith("\\"):
                self._refuse("has a quote that shells end differently")
            self._at = end + 1
            return part, "\\" not in part
        elif follows == '"' and not quoted:
            self._at += 2
            return self._quoted()
        elif variable := _VARIABLE.match(text, begin + 1):
            self._at = variable.end()
        else:
            self._at += 1
            return "$", True
        return text[begin : self._at], False

    def _substitution(self) -> None:
        """The rest of `$(…)`: a list of commands with here-documents of its own."""
        self._depth += 1
        if self._depth > MAX_DEPTH:
            self._refuse("is nested too deeply")
        heres, self._heres = self._heres, []
        self.read(nested=True)
        self._heres = heres
        self._depth -= 1

    def _parameter(self) -> None:
        """The rest of `${…}`."""
        text = self._text
        if text[self._at : self._at + 1] in ("", " ", "\t", "\n", "|", "("):
            self._refuse("has a `${` that shells read differently")
        while self._at < len(text):
            character = text[self._at]
            if character == "}":
                self._at += 1
                return
            if character in "'\"" or text.startswith(("<(", ">("), self._at):
                self._refuse("has a quote or a substitution within `${…}`, which shells read differently")
            if character == "\\":
                self._at += 2
            elif character == "$":
                self._depth += 1
                if self._depth > MAX_DEPTH:
                    self._refuse("is nested too deeply")
                self._dollar(quoted=True)
                self._depth -= 1
            elif character == "`":
                self._backticks(quoted=True)
            else:
                self._at += 1
        self._refuse("has an open substitution")

    def _backticks(self, *, quoted: bool) -> tuple[str, bool]:
        text, begin, inner = self._text, self._at, list[str]()
        self._at += 1
        while text[self._at : self._at + 1] != "`":
            if self._at >= len(text):
                self._refuse("has an open substitution")
            if text[self._at] == "\\":
                escaped = text[self._at + 1 : self._at + 2]
                if quoted and escaped == '"':
                    self._refuse("has a quote within backticks that shells read differently")
                inner.append(escaped if escaped and escaped in "`\\$" else f"\\{escaped}")
                self._at += 2
            else:
                inner.append(text[self._at])
                self._at += 1
        self._at += 1
        _Reader("".join(inner), self._where, self._reading, self._depth + 1).read()
        return text[begin : self._at], False

    def _closing(self, quote: str, begin: int) -> int:
        end = self._text.find(quote, begin)
        if end < 0:
            self._refuse("is a command with an open quote")
        return end

    def _refuse(self, why: str) -> NoReturn:
        raise Failure("E3206", f"argument `{self._where}` {why}")


def _mode(program: str) -> str:
    name = os.path.basename(program)
    return "words" if name in _STARTERS else "shell" if name in _EVALUATORS else "script" if name in _SHELLS else ""


def _begins_with_program(starter: str) -> bool:
    return os.path.basename(starter) != "find"  # its first argument is the directory to search

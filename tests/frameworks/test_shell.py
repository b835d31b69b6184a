"""Scripts are read as bash would run them: bash itself is the oracle, with `show` in place of every program."""

from __future__ import annotations

import shutil
import subprocess
from fractions import Fraction

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from phalanx.frameworks.shell.filters import program_output
from phalanx.frameworks.shell.scope import LARGEST_WORK, is_open, plain
from phalanx.frameworks.shell.script import follow
from phalanx.spec.errors import InputError

BASH = shutil.which("bash")
needs_bash = pytest.mark.skipif(BASH is None, reason="bash is the oracle")
_SHOW = 'show() { printf "["; for w in "$@"; do printf "<%s>" "$w"; done; printf "]\\n"; }\n'


def by_bash(script: str) -> list[list[str]]:
    """Return the words of every `show` that bash runs."""
    environment = {"PATH": "/usr/bin:/bin", "LC_ALL": "C"}
    ran = subprocess.run(  # a script of this file, in an environment of its own
        [str(BASH), "-c", _SHOW + script], capture_output=True, text=True, env=environment, timeout=20, check=False
    )
    lines = [line.removeprefix("[") for line in ran.stdout.split("]\n") if line.startswith("[")]
    return [line[1:-1].split("><") if line else [] for line in lines]


def by_us(script: str) -> list[list[str]]:
    """Return the words of every `show` that we read."""
    return [list(map(plain, i.words[1:])) for i in follow(script).invocations if i.words[0] == "show"]


# fmt: off
SAME = [
    'A=1; B="$A 2"; show $B "$B" \'$B\'',
    'A=(a "b c" d); show ${A[@]} "${A[@]}" "${A[*]}" ${#A[@]} ${A[1]} "$A"; A+=(e); show "${A[@]:1:2}" ${A[-1]}',
    'X=""; show ${X:-a} ${X-b} "${X:-c d}" ${Y:-e f} "${Y:+g}" ${X:+h} "$X" $X',
    ': ${CP:=3}; show $CP; : "${CP:=4}"; show $CP',
    "W=8; show $((W * 4)) $((W/3+1)) $(( W % 3 )) $((W > 3 ? 1 : 2)) $((2**5)) $((-7/2)) $((W<<2|1))",
    'for i in 1 2 3; do show $i; done; for ((i=0;i<3;i++)); do show "i$i"; done; i=0; '
    'while [ $i -lt 2 ]; do show $i; ((i++)); done',
    "F=a.b.c; show ${F%.*} ${F%%.*} ${F#*.} ${F##*.} ${F/b/X} ${F//./_} ${F^^} ${#F} ${F:2} ${F:0:1} ${F: -1}",
    'if [ "$U" == "1" ]; then show a; elif [[ -z $U ]]; then show b; else show c; fi; '
    '[ 3 -gt 2 ] && show d || show e',
    'case "x86" in arm*) show a;; x*|y) show b;; *) show c;; esac; [[ abc == a* ]] && show d; '
    '[[ abc == "a*" ]] || show e',
    'f() { show "$@" $# "$1"; shift; show $1; }; f 1 "2 3" 4; function g { show g; }; g',
    ''
    ''
    'show $(echo "a b" | tr " " "-") $(basename /x/y.sh .sh) $(dirname /x/y) $(expr 2 \\* 3 + 4 \\* 5) $(seq '
    '-s, 1 3) $(echo a,b,c | cut -d, -f2)',
    'T=$(printf "a:1:x\nb:2:y\nc:3:z\n"); show $(echo "$T" | tail -n +2) $(echo "$T" | head -n -1) '
    '$(echo "$T" | head -2) $(echo "$T" | tail -n1) $(echo "$T" | cut -d: -f1,3) $(echo "$T" | cut -d: -f2-)',
    'X=$(cat <<E\nA b\nE\n); show "$X"; cat <<E | true\n--no $X\nE\nshow 1',
    'A="--x 1 --y 2"; show $A "$A"; set -- p q; show "$@" $1 $#; set -- $A; show $2',
    'show a\\ b \'c\'"d"e $\'x\\ty\' "\\$A" \\$B "a\\\\b"; show {a,b}c {1..3}',
    "(X=2; show $X); X=1; { X=3; }; show $X; unset X; show ${X-gone}",
    "eval \"Z=5; show \\$Z\"; N=Z; show ${!N}; bash -c 'echo' >/dev/null; show end # --not 1",
    "A=1 B=2; export C=3 D=$A; readonly E=4; show $A$B$C$D$E; local=7; show $local",
    "i=5; until [ $i -le 3 ]; do i=$((i-1)); done; show $i; for x in a b c; do [ $x = b ] && continue; show $x; done",
    'A=(1 2); B=("${A[@]/#/n}"); for k in "${!A[@]}"; do show $k; done; printf -v x y 2>/dev/null; '
    'show ${A[0]}${A[1]}',
    "V=10; if (( V > 9 && V < 20 )); then show in; fi; if ! [ $V = 9 ]; then show not; fi; "
    "show $(( V == 10 )) $((V>=11))",
    'show "$(printf "%s-%d" a 3)" `echo back` "$(echo "q \\"r\\"")" $(echo $((1+1)))',
    'declare -A T=([a]=1 [b]="2 3"); T[c]=4; K=b; show ${T[a]} "${T[$K]}" ${#T[@]} ${T[c]} ${T[none]:-d}',
    "if true; then false; fi || show a; if false; then false; fi && show b; for i in 1; do false; done || show c; "
    "f() { return 1; }; f || show d; case x in x) false;; esac || show e; { false; } || show f; (false) || show g; "
    "if false; then true; else false; fi || show h; while false; do true; done && show i; "
    "if true; then false; fi && show j; for i in 1; do true; done || show k; f && show l; (false) && show m",
    "show a \\\n  b \\\n  --c=d\nshow e;\nshow f &\nwait; true && show g; false || show h; ! false && show i",
]


@pytest.mark.parametrize("filter_", ["head -c 5", "tail -c 5", "cut -c1-3", "head -n 2 other.txt"])
def test_an_option_of_a_filter_that_is_not_read_leaves_its_output_open(filter_: str) -> None:
    assert by_us(f"show $(echo abcdefgh | {filter_})") == [[f"$(echo abcdefgh | {filter_})"]]


@needs_bash
@pytest.mark.parametrize("script", SAME)
def test_a_script_is_read_as_bash_runs_it(script: str) -> None:
    assert by_us(script) == by_bash(script)


_NAMES = st.sampled_from("ABC")
_WORDS = st.sampled_from(
    [
        "1",
        "x",
        '"a b"',
        "$A",
        '"$B"',
        "${C}",
        "${A:-d}",
        "${B:+s}",
        "$((1+2))",
        "'q $A'",
        "${#A}",
        '"${C:-e f}"',
        "--g=$A",
    ]
)


@st.composite
def scripts(draw: st.DrawFn, depth: int = 2) -> str:
    """Draw a script of assignments, conditions, loops and functions."""
    lines = []
    for _ in range(draw(st.integers(1, 4))):
        form = draw(st.integers(0, 6 if depth else 2))
        words = " ".join(draw(st.lists(_WORDS, max_size=3)))
        if form == 0:
            lines.append(f"{draw(_NAMES)}={draw(_WORDS)}")
        elif form == 1:
            lines.append(f"show {words}")
        elif form == 2:
            lines.append(f'{draw(_NAMES)}+="{draw(st.sampled_from(["y", " $A", ""]))}"')
        else:
            inner = draw(scripts(depth - 1))
            test = draw(
                st.sampled_from(['[ "$A" = x ]', "[[ -n $B ]]", "(( 2 > 1 ))", '[ -z "$C" ]', "true", "! true"])
            )
            lines.append(
                {
                    3: f"if {test}; then\n{inner}\nelse\nshow no {words}\nfi",
                    4: f"for {draw(_NAMES)} in {words}; do\n{inner}\ndone",
                    5: f"( {inner}\n)",
                    6: f"{test} && {{ {inner}\n}}",
                }[form]
            )
    return "\n".join(lines)


@needs_bash
@given(scripts())
def test_drawn_scripts_are_read_as_bash_runs_them(script: str) -> None:
    start = "A=x; B=; C=z\n"
    try:
        read = by_us(start + script)
    except InputError as error:  # loops that double a variable until bash has no memory for it either
        assume("make more than" not in str(error))
        raise
    assert read == by_bash(start + script)


@pytest.mark.parametrize(
    ("script", "said"),
    [
        ("run --a 'b", "line 1: has a quote that does not end"),
        ("if true; then\nrun", "fi is missing"),
        ("cat <<EOF\nx", "has a here-document that does not end: EOF"),
        ("run $(echo", "has a ( that does not end"),
        ("A=(1 2", "the array A does not end"),
        ("x" + "{" * 5 + "(" * 60, "is nested more than 40 deep"),
        ("case x in", "missing"),
        ("A=x\n" + "A=$A$A\n" * 40, "make more than"),
        ("run " * 50_001, "has more than 50,000 words"),
        ("run " + "{a,b}" * 40, "make more than"),
        ("run " + "{1..9999}" * 4, "make more than"),
    ],
)
def test_what_a_shell_refuses_gets_one_line(script: str, said: str) -> None:
    with pytest.raises(InputError) as caught:
        follow(script)
    assert said in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("script", ["while true; do A=x$A; done", "f() { f; }; f"])
def test_what_never_ends_starts_nothing(script: str) -> None:
    assert not follow(script).invocations


def test_what_only_a_shell_could_tell_is_open() -> None:
    (run,) = follow("M=$(hostname)\nrun --a $M --b $HOME/x --c $(nproc) $EXTRA '$A'").invocations
    assert [is_open(w) for w in run.words] == [False, False, True, False, True, False, True, True, False]
    assert [plain(w) for w in run.words][2::2] == ["$(hostname)", "$HOME/x", "$(nproc)", "$A"]


def test_open_text_is_one_word_for_every_shell_that_reads_it() -> None:
    script = "H=$(host --a 'b' | head; x)\nC=\"go --h $H:1 --n 2\"\nbash -c \"$C\"\neval $C"
    found = follow(script).invocations
    assert [i.words[3:] for i in found] == [("--n", "2")] * 2
    assert {plain(i.words[2]) for i in found} == {"$(host --a 'b' | head; x):1"}


def test_how_many_an_open_word_is_is_open() -> None:
    (run,) = follow("A=($HOSTS)\nB=$(nproc)\nrun ${#A[@]} ${#B}").invocations
    assert [is_open(w) for w in run.words] == [False, True, True]


def test_branches_are_decided_by_the_script_and_else_named() -> None:
    script = 'O=a\nif [ "$FP8" = 1 ]; then O=b; fi\nif [ -f x ]; then P=1; else P=2; fi\nrun $O $P'
    found = follow(script)
    (run,) = found.invocations
    assert [plain(w) for w in run.words] == ["run", "a", "$P"]
    notes = [fork.note(run.names) for fork in found.forks]
    assert notes[0] == "line 2: FP8 of the environment decides, taken as unset: O is a, else b"
    assert notes[1].startswith("line 3: ")
    assert "P is 1, else 2" in notes[1]


def test_a_command_that_a_variable_adds_to_is_said_by_what_it_adds() -> None:
    words = " ".join(f"--flag-{n} {n}" for n in range(40))
    found = follow(f'C="train.py {words}"\nif [ -n "$KEY" ]; then C="$C --wandb-project p"; fi\n$C')
    (note,) = (fork.note(found.invocations[0].names | {"C"}) for fork in found.forks)
    assert note == "line 2: KEY of the environment decides, taken as unset: C is ..., else ... --wandb-project p"
    assert found.forks[0].note(frozenset("X")) == ""


def test_a_run_that_succeeds_passes_its_guards() -> None:
    assert by_us("false || exit 1 && show a; show b") == [["a"], ["b"]]
    assert by_us("show a; exit; show b") == by_us("show a; exit 0; show b") == [["a"]]


@pytest.mark.parametrize("shell", ["bash", "sh"])
def test_text_that_is_piped_into_a_shell_is_run(shell: str) -> None:
    assert by_us(f"A=2; echo 'show 1; show '$A | {shell}; show 3") == [["1"], ["2"], ["3"]]


def test_scripts_that_it_runs_and_writes_are_read() -> None:
    inside = {"env.sh": "TP=4", "train.sh": 'run --tp $TP "$@"'}
    script = (
        "source env.sh\nexport TP\ncat > d.json <<E\n{\"a\": $TP}\nE\nbash train.sh --x 1\nsrun bash -c 'run --y'"
    )
    found = follow(script, include=inside.get)
    assert [i.words for i in found.invocations] == [("run", "--tp", "4", "--x", "1"), ("srun", "run", "--y")]
    assert found.files == {"d.json": '{"a": 4}\n'}
    assert "train.sh, which it runs, is not here: give it too" in follow(script).notes


@settings(max_examples=30)
@given(st.integers(-99, 99), st.integers(-9, 9).filter(bool), st.integers(1, 9), st.integers(0, 9))
def test_bc_cuts_a_quotient_to_its_scale_before_it_multiplies(a: int, b: int, c: int, scale: int) -> None:
    found = Fraction((program_output(["bc"], f"scale={scale}\n{a}/{b}*{c}\n") or "").strip())
    assert found == c * Fraction(int(Fraction(a, b) * 10**scale), 10**scale)


def test_a_file_that_grows_counts_as_work() -> None:
    """All of it each time: a loop that appends to a file would take memory by the square of its rounds."""
    rounds, long = 200, LARGEST_WORK // 100
    script = f"A={'x' * (long // 100)}\nfor i in {{1..100}}; do echo $A >> f; done\n"
    script += f"for i in {{1..{rounds}}}; do echo y >> f; done\n"
    with pytest.raises(InputError, match="loops make more than"):
        follow(script)


@given(
    st.lists(st.tuples(st.integers(0, 3), st.booleans()), min_size=1, max_size=4),
    st.sampled_from(["$ ", "(env) me@host:~/x$ "]),
)
def test_a_pasted_session_is_what_was_typed_in_it(commands: list[tuple[int, bool]], prompt: str) -> None:
    """Commands of several lines, each perhaps followed by what it printed."""
    session, typed = [], []
    for i, (more, printed_something) in enumerate(commands):
        lines = " \\\n".join([f"show {i}", *["more"] * more]).split("\n")
        typed += lines
        session += [prompt + lines[0], *lines[1:], *["show what it printed"] * printed_something]
    assert by_us("\n".join(session)) == by_us("\n".join(typed)) != []

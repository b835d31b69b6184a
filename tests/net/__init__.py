"""A net under the answers: every command's numbers as recorded, while names around them change.

`make net` asks the questions of questions.txt and compares each answer with answers.jsonl.xz; -k selects some:
`pytest tests/net -k predict`. A difference names the question, the path in the answer, before and after. When
you change something on purpose, add a file changes/YOURS.toml (never edit an answer), with

    [[command]]  old, new                    a regular expression in the line as it was typed, and its replacement
    [[key]]      question, old, new          likewise in a path such as `choices[3].seconds`; `times`: the new unit
    [[gone]]     question, path, reason      leaves that are dropped, because others in the answer imply them
    [[changed]]  question, path, reason      leaves that differ, and why that is right
    [[numbers]]  question, reason            a restructured answer: each old number must occur in the new one;
                                             `without`: paths of the old answer to leave out; `times`: other units

`question` and `path` are regular expressions that are searched for; without one, all match; the path `code` is the
exit code. Keys that are added are no difference, nor are the words of sentences, comments and pages: their numbers
are compared. masked.toml lists what depends on the machine, the moment or the version. New questions are recorded by
`python -m net.record` in tests/. Where all prices change on purpose (new constants), show that the commit before has
no difference; then `python -m net.record --all` records anew, and the tables of before go.
"""

"""``equipool completion``: what a shell needs to complete commands, options and their values."""

from __future__ import annotations

import argparse

from equipool.cli.parser import build_parser

BASH = """\
_equipool() {{
    local words= before=${{COMP_WORDS[COMP_CWORD-1]}} word=${{COMP_WORDS[COMP_CWORD]}}
    case "$COMP_CWORD ${{COMP_WORDS[1]}} $before $word" in
        1*) words="{commands}" ;;
{rules}
    esac
    COMPREPLY=()
    [ -n "$words" ] && COMPREPLY=($(compgen -W "$words" -- "$word"))
}}
complete -o default -F _equipool equipool"""


def run(arguments: argparse.Namespace) -> int:
    """Print the script."""
    parsers = build_parser()[1]
    rules = []  # patterns for bash, and words
    fish = [f"complete -c equipool -n __fish_use_subcommand -f -a '{' '.join(parsers)}'"]
    for name, parser in parsers.items():
        for action in parser._actions:
            words, flags = " ".join(map(str, action.choices or ())), action.option_strings
            # A value follows its option, or, where it has none, the command.
            rules += [(f'*" {name} {before} "*', words) for before in flags or [name] if words]
            fish.append(
                f"complete -c equipool -n '__fish_seen_subcommand_from {name}'"
                + (f" -l {flags[-1].removeprefix('--')}" if flags else "")
                + (f" -x -a '{words}'" if words else "")
            )
        rules.append((f'*" {name} "*" -"*', " ".join(parser._option_string_actions)))
    if arguments.shell == "fish":
        print("\n".join(fish))
        return 0
    if arguments.shell == "zsh":
        print("autoload -U +X bashcompinit && bashcompinit")
    lines = (f'        {pattern}) words="{words}" ;;' for pattern, words in rules)
    print(BASH.format(commands=" ".join(parsers), rules="\n".join(lines)))
    return 0

"""``equipool completion``: what a shell needs to complete commands, options and their values."""

from __future__ import annotations

import argparse
from collections.abc import Mapping

from equipool.cli.parser import build_parser

BASH = """\
_equipool() {{
    local words= word=${{COMP_WORDS[COMP_CWORD]}}
    local before=${{COMP_WORDS[COMP_CWORD-1]}} command=${{COMP_WORDS[1]}}
    COMPREPLY=()
    if [ "$COMP_CWORD" -eq 1 ]; then
        words="{commands}"
    else
        case "$command $before" in
{values}
        *) case "$word" in -*) case "$command" in
{options}
            esac ;; esac ;;
        esac
    fi
    [ -n "$words" ] && COMPREPLY=($(compgen -W "$words" -- "$word"))
}}
complete -o default -F _equipool equipool
"""


def run(arguments: argparse.Namespace) -> int:
    """Print the script."""
    parsers = build_parser()[1]
    if arguments.shell == "fish":
        print("\n".join(_fish(parsers)))
        return 0
    if arguments.shell == "zsh":
        print("autoload -U +X bashcompinit && bashcompinit")
    print(_bash(parsers))
    return 0


def _bash(parsers: Mapping[str, argparse.ArgumentParser]) -> str:
    options, values = [], []
    for name, parser in parsers.items():
        flags = [flag for action in parser._actions for flag in action.option_strings if flag != "-h"]
        options.append(f'            {name}) words="{" ".join(flags)}" ;;')
        for action in parser._actions:
            # A value follows its option, or, where it has none, the command.
            for before in action.option_strings or [name]:
                if action.choices:
                    words = " ".join(map(str, action.choices))
                    values.append(f'        "{name} {before}") words="{words}" ;;')
    return BASH.format(commands=" ".join(parsers), options="\n".join(options), values="\n".join(values))


def _fish(parsers: Mapping[str, argparse.ArgumentParser]) -> list[str]:
    lines = [f"complete -c equipool -n __fish_use_subcommand -f -a '{' '.join(parsers)}'"]
    for name, parser in parsers.items():
        here = f"complete -c equipool -n '__fish_seen_subcommand_from {name}'"
        for action in parser._actions:
            values = f" -x -a '{' '.join(map(str, action.choices))}'" if action.choices else ""
            flags = [flag[2:] for flag in action.option_strings if flag.startswith("--")]
            lines += [f"{here} -l {flag}{values}" for flag in flags]
            if values and not action.option_strings:
                lines.append(here + values)
    return lines

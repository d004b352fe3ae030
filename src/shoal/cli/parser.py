"""How commands are declared: one plain line for a mistake, `--help` with an example, `--help-all` for the rest."""

import argparse
import re
from difflib import get_close_matches
from typing import Any, NoReturn

import msgspec

from shoal.errors import InputError
from shoal.job.settings import SETTABLE


class CommandParser(argparse.ArgumentParser):
    """One plain line for a mistake, with the nearest name."""

    def __init__(self, **more: Any) -> None:
        more |= {"formatter_class": argparse.RawDescriptionHelpFormatter, "allow_abbrev": False}
        super().__init__(**more)

    def error(self, message: str) -> NoReturn:
        unknown = re.match(r"argument COMMAND: invalid choice: '(.*)' \(choose from (.*)\)", message)
        if unknown:
            names = re.findall(r"\w+", unknown[2])
            near = get_close_matches(unknown[1], names, n=1)
            fix = f"did you mean {near[0]}?" if near else f"one of {', '.join(names)}"
            raise InputError(f"unknown command {unknown[1]}", fix=fix)
        raise InputError(f"{message[0].lower()}{message[1:]}", fix=f"{self.prog} --help")

    def parse_args(self, args: Any = None, namespace: Any = None) -> Any:
        found, unknown = self.parse_known_args(args, namespace)
        if unknown:
            refuse, words = getattr(found, "refuse_unknown", None), list(args or ())  # a command may know better
            raise self.unknown(unknown[0], found, words) if refuse is None else refuse(unknown, found, words)
        return found

    def unknown(self, name: str, found: argparse.Namespace, words: list[str]) -> InputError:
        """`words`: all that was given."""
        command = getattr(found, "parser", self)
        options = [option for action in command._actions for option in action.option_strings]
        given, _, value = name.partition("=")
        fields = {f"--{each.replace('_', '-')}": each for each in SETTABLE} if "--set" in options else {}
        near = get_close_matches(given.replace("_", "-"), [*options, *fields], n=1)
        kind = "option" if name.startswith("-") else "argument"
        fix = f"{command.prog} --help shows what there is"
        if near and near[0] in options:
            fix = f"did you mean {near[0]}?"
        elif near:
            after = words[words.index(name) + 1 :][:1] if name in words else []
            value = value or next((word for word in after if not word.startswith("-")), "…")
            fix = f"did you mean --set {fields[near[0]]}={value}?"
        return InputError(f"unknown {kind} {name}", fix=fix)


class HelpAll(argparse.Action):
    """`--help-all`: prints the help with the options that `--help` leaves out."""

    def __call__(self, parser: argparse.ArgumentParser, *arguments: Any) -> NoReturn:
        for action in parser._actions:
            if action.help == argparse.SUPPRESS:
                action.help = getattr(action, "full_help", None)
        parser.print_help()
        parser.exit(0)


def rare_option(parser: Any, *names: str, help: str, **more: Any) -> None:
    """An option that `--help` leaves out and `--help-all` shows."""
    action = parser.add_argument(*names, help=argparse.SUPPRESS, **more)
    action.full_help = help


def command(commands: Any, name: str, text: str, call: Any, example: str) -> CommandParser:
    """Declares a command: `call(namespace)` carries it out and returns the exit code."""
    parser: CommandParser = commands.add_parser(name, description=text, epilog=f"example: {example}")
    parser.set_defaults(call=call, parser=parser)
    return parser


def print_json(value: Any) -> None:
    print(msgspec.json.encode(value).decode())

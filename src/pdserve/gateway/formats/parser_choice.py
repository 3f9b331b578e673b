"""What whoever starts a gateway may say of its model's formats. The values are those of the command line."""

from enum import Enum


class ToolParserChoice(Enum):
    AUTO = "auto"
    """As the template writes them; Hermes, with tools described by us, where it knows no tools."""
    HERMES = "hermes"
    LLAMA3 = "llama3"
    DEEPSEEK_V3 = "deepseek_v3"
    DEEPSEEK_V31 = "deepseek_v31"
    NONE = "none"
    """Tools are refused."""


class ReasoningParserChoice(Enum):
    AUTO = "auto"
    """`think`, where the template has its tags."""
    THINK = "think"
    """Between `<think>` and `</think>`."""
    NONE = "none"

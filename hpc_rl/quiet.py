"""Keeps the libraries' chatter off the terminal; ``HPC_RL_DEBUG=1`` or ``hpc-rl train --debug`` shows all of it.

Errors are exceptions and pass in any case; so do the messages of this project and warnings of a user's own code.
"""

from __future__ import annotations

import logging
import os
import sys
import warnings

DEBUG_VARIABLE = "HPC_RL_DEBUG"
# What they warn of is for those who write them: missing optional packages, names that will change one day.
LIBRARIES = ("megatron", "torch", "vllm", "transformers", "huggingface_hub", "tokenizers", "triton", "numba")
# Warnings of those libraries that are laid at the door of our code, because it calls them.
MESSAGES = (r"The \.grad attribute of a Tensor that is not a leaf Tensor",)
_FORMAT = "hpc-rl: %(levelname)s: %(message)s"


def debugging() -> bool:
    """Whether the user wants to see everything."""
    return os.environ.get(DEBUG_VARIABLE, "") not in ("", "0")


def quiet() -> None:
    """Call once in a process of ours, before anything heavy is imported; its children inherit the environment."""
    _handle_own_messages()
    if debugging():
        warnings.simplefilter("default")
        os.environ.setdefault("VLLM_CONFIGURE_LOGGING", "1")
        os.environ.setdefault("VLLM_LOGGING_LEVEL", "INFO")
        return
    for name, value in {"TORCH_CPP_LOG_LEVEL": "ERROR", "TRANSFORMERS_VERBOSITY": "error"}.items():
        os.environ.setdefault(name, value)
    for library in LIBRARIES:
        warnings.filterwarnings("ignore", module=rf"{library}(\.|$)")
        logging.getLogger(library).setLevel(logging.ERROR)
    for message in MESSAGES:
        warnings.filterwarnings("ignore", message=message)


def _handle_own_messages() -> None:
    """This project's loggers write one line each to stderr."""
    logger = logging.getLogger("hpc_rl")
    if not logger.handlers:
        handler = logging.StreamHandler(sys.stderr)
        handler.setFormatter(_Lower(_FORMAT))
        logger.addHandler(handler)
        logger.propagate = False


class _Lower(logging.Formatter):
    """``warning`` rather than ``WARNING``, as the other messages have it."""

    def format(self, record: logging.LogRecord) -> str:
        record.levelname = record.levelname.lower()
        return super().format(record)

"""Digests of what turns messages into tokens, by which a resumed run notices other contents."""

import hashlib

from agentrl.config.sections import ModelSection
from agentrl.models.checkpoints.resolve import resolve_model
from agentrl.renderers.model_files import read_model_files


def text_digests(model: ModelSection) -> dict[str, str]:
    """Return the digests of the configured model's chat template and vocabulary, by these names.

    Raises:
        ConfigError: a file of the model is missing or malformed.
    """
    path = resolve_model(model.model_name_or_path, with_weights=False)
    files = read_model_files(path, chat_template=model.chat_template)
    texts = {"chat template": files.chat_template, "vocabulary": files.tokenizer_json}
    return {name: hashlib.sha256(text.encode()).hexdigest() for name, text in texts.items()}

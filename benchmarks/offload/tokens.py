"""A tokenizer made in memory: it knows letters. Stands in for the pipelines' trained ones."""

import string
from typing import Any

#: Letters, and four special tokens before them.
VOCABULARY = 4 + len(string.printable)


def letters(max_length: int) -> Any:
    """A fast tokenizer for CLIP and T5 encoders alike: begins with 1, ends with 2, pads with 0."""
    from tokenizers import Tokenizer, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    known = ["<pad>", "<s>", "</s>", "<unk>", *string.printable]
    made = Tokenizer(models.WordLevel({t: i for i, t in enumerate(known)}, unk_token="<unk>"))
    made.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    made.post_processor = processors.TemplateProcessing(
        single="<s> $A </s>", special_tokens=[("<s>", 1), ("</s>", 2)]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=made,
        pad_token="<pad>",
        bos_token="<s>",
        eos_token="</s>",
        unk_token="<unk>",
        model_max_length=max_length,
    )

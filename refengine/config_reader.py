"""Reading JSON objects key by key: each key is asked for with its type, and those that nobody asked for are known. Floor 2."""
from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from refengine.errors import ConfigError

# Keys that are known not to change the forward pass of these families. Any other key stops the loading by name.
WITHOUT_EFFECT = frozenset("""
    architectures model_type torch_dtype dtype transformers_version auto_map _name_or_path name_or_path _commit_hash
    use_cache initializer_range attention_dropout hidden_dropout embd_pdrop resid_pdrop attn_pdrop pretraining_tp
    max_window_layers sliding_window use_sliding_window layer_types output_attentions output_hidden_states return_dict
    use_return_dict torchscript use_bfloat16 is_encoder_decoder is_decoder add_cross_attention chunk_size_feed_forward
    cross_attention_hidden_size tie_encoder_decoder pruned_heads finetuning_task id2label label2id num_labels
    problem_type task_specific_params tokenizer_class prefix bos_token_id eos_token_id pad_token_id sep_token_id
    decoder_start_token_id min_length max_length do_sample early_stopping num_beams num_beam_groups diversity_penalty
    temperature top_k top_p typical_p repetition_penalty length_penalty no_repeat_ngram_size
    encoder_no_repeat_ngram_size bad_words_ids num_return_sequences output_scores return_dict_in_generate
    forced_bos_token_id forced_eos_token_id remove_invalid_values exponential_decay_length_penalty suppress_tokens
    begin_suppress_tokens tf_legacy_loss rope_interleaved is_llama_config transformers.js_config unsloth_version
    unsloth_fixed max_position_embeddings rope_theta rope_scaling rope_parameters default_theta
""".split())


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a file. Raises ConfigError when it is missing or something else."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read ({error.strerror})") from None
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{path}: is not JSON ({error})") from None
    if not isinstance(value, dict):
        raise ConfigError(f"{path}: holds a {type(value).__name__}, not an object")
    return value


def read_ids(raw: dict[str, Any], key: str, path: Path) -> list[int]:
    """A token id, a list of them, or nothing."""
    value = raw.get(key)
    ids = [] if value is None else value if isinstance(value, list) else [value]
    if not all(type(i) is int and i >= 0 for i in ids):
        raise ConfigError(f"{path}: {key} is {value!r}, not a token id or a list of them")
    return list(ids)


class Reader:
    """Takes keys out of a configuration, and knows afterwards which were never asked for."""

    def __init__(self, raw: dict[str, Any], where: str):
        self.raw, self.where, self.seen = raw, where, set()

    def error(self, text: str) -> ConfigError:
        return ConfigError(f"{self.where}: {text}")

    def get(self, key: str, kind: type, default: Any = ...) -> Any:
        self.seen.add(key)
        value = self.raw.get(key)
        if value is None:
            if default is ...:
                raise self.error(f"{key} is missing")
            return default
        if kind is float and type(value) is int and abs(value) < 2**53:
            value = float(value)
        if type(value) is not kind:
            raise self.error(f"{key} is {value!r}, not a {kind.__name__}")
        if kind in (int, float) and not 0 < value < float("inf"):
            raise self.error(f"{key} is {value!r}, not above 0")
        return value

    def refuse(self, key: str, *harmless: Any, why: str) -> None:
        self.seen.add(key)
        if self.raw.get(key) not in (None, *harmless):
            raise self.error(f"{key} is {self.raw[key]!r}: {why}")

    def unknown(self) -> list[str]:
        return sorted(set(self.raw) - self.seen - WITHOUT_EFFECT)

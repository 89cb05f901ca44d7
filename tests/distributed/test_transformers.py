"""Models people train, tiny and with random weights: over the mesh they train like one process in plain torch.

Nothing is downloaded.  Dropout is 0, so that both sides compute the same function.
"""

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F
from setup import Setup, align, assert_same, check_invariants

import dmuon

pytestmark = pytest.mark.ranks(2)

transformers = pytest.importorskip("transformers", reason="the models are transformers'")

STEPS = 2
VOCAB = 61
IMAGE_TOKEN = 60
WIDTHS = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
TEXT = WIDTHS | {"vocab_size": VOCAB, "num_key_value_heads": 2, "initializer_range": 0.1}
IMAGES = WIDTHS | {"image_size": 16, "patch_size": 4, "initializer_range": 0.1}
PATCHES = 16

Inputs = dict[str, torch.Tensor]


@dataclass
class Case:
    make: Callable[[], nn.Module]
    inputs: Callable[[torch.Generator], Inputs]
    predicate: Callable[[str, nn.Parameter], bool]
    matrices: int
    """How many are dedicated."""


def in_layers(name: str, parameter: nn.Parameter) -> bool:
    """Matrices of llama's model.layers.N, BERT's encoder.layer.N, T5's encoder.block.N; never 3-D stacks of experts."""
    return parameter.ndim == 2 and re.search(r"\b(layers?|block)\.\d", name) is not None


def layers_of(model: nn.Module) -> Iterator[nn.Module]:
    """The layers, of every stack there is: entries of module lists that are inside no other entry."""
    lists = [name for name, module in model.named_modules() if isinstance(module, nn.ModuleList)]
    for name in lists:
        if not any(name.startswith(f"{other}.") for other in lists):
            yield from model.get_submodule(name)


def tokens(generator: torch.Generator, length: int = 12) -> torch.Tensor:
    return torch.randint(1, VOCAB - 1, (4, length), generator=generator)


def text(generator: torch.Generator) -> Inputs:
    ids = tokens(generator)
    return {"input_ids": ids, "labels": ids}


def masked_text(generator: torch.Generator) -> Inputs:
    """The last tokens of one sample are padding."""
    labels = tokens(generator)
    mask = torch.ones_like(labels)
    mask[0, -3:] = 0
    hidden = torch.rand(labels.shape, generator=generator) < 0.3
    return {
        "input_ids": labels.masked_fill(hidden, 0),
        "attention_mask": mask,
        "labels": labels.masked_fill(mask == 0, -100),
    }


def two_texts(generator: torch.Generator) -> Inputs:
    return {"input_ids": tokens(generator, 14), "labels": tokens(generator)}


def images(generator: torch.Generator) -> torch.Tensor:
    return torch.randn(4, 3, 16, 16, generator=generator)


def labelled_images(generator: torch.Generator) -> Inputs:
    return {"pixel_values": images(generator), "labels": torch.randint(0, 7, (4,), generator=generator)}


def text_with_image(generator: torch.Generator) -> Inputs:
    ids = torch.cat([torch.full((4, PATCHES), IMAGE_TOKEN), tokens(generator)], dim=1)
    return {"input_ids": ids, "pixel_values": images(generator), "labels": ids}


def llama(**options) -> nn.Module:
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**TEXT, **options))


def qwen3() -> nn.Module:
    return transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**TEXT, head_dim=8))


def qwen3_moe() -> nn.Module:
    sizes = {"moe_intermediate_size": 24, "num_experts": 4, "num_experts_per_tok": 2, "head_dim": 8}
    config = transformers.Qwen3MoeConfig(**TEXT, **sizes, experts_implementation="eager")
    return transformers.Qwen3MoeForCausalLM(config)


def without_key_biases(model: nn.Module) -> nn.Module:
    """Softmax ignores them: their gradients are rounding errors, which AdamW would blow up to full steps."""
    for name, parameter in model.named_parameters():
        if name.endswith(("key.bias", "k_proj.bias")):
            parameter.requires_grad_(False)
    return model


def vit() -> nn.Module:
    return without_key_biases(transformers.ViTForImageClassification(transformers.ViTConfig(**IMAGES, num_labels=7)))


def bert() -> nn.Module:
    dropout = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    config = transformers.BertConfig(**WIDTHS, **dropout, vocab_size=VOCAB, initializer_range=0.1)
    return without_key_biases(transformers.BertForMaskedLM(config))


def t5() -> nn.Module:
    sizes = {"d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_heads": 4}
    return transformers.T5ForConditionalGeneration(
        transformers.T5Config(**sizes, vocab_size=VOCAB, dropout_rate=0.0, decoder_start_token_id=0)
    )


def llava() -> nn.Module:
    """The last layer of its vision tower runs, but its output is not used."""
    config = transformers.LlavaConfig(
        vision_config=transformers.CLIPVisionConfig(**IMAGES),
        text_config=transformers.LlamaConfig(**TEXT),
        image_token_index=IMAGE_TOKEN,
        image_seq_length=PATCHES,
    )
    return without_key_biases(transformers.LlavaForConditionalGeneration(config))


CASES = {
    "llama": Case(llama, text, in_layers, 14),
    "llama_tied": Case(lambda: llama(tie_word_embeddings=True), text, in_layers, 14),
    "qwen3": Case(qwen3, text, in_layers, 14),
    "qwen3_moe": Case(qwen3_moe, text, in_layers, 10),
    "vit": Case(vit, labelled_images, in_layers, 12),
    "bert": Case(bert, masked_text, in_layers, 12),
    "t5": Case(t5, two_texts, in_layers, 34),
    "llava": Case(llava, text_with_image, in_layers, 26),
}


def loss_of(call: Callable, case: Case, step: int, rank: int, device: str) -> torch.Tensor:
    inputs = case.inputs(torch.Generator().manual_seed(1000 * step + rank))
    return call(**{name: value.to(device) for name, value in inputs.items()}).loss


def train(mesh, rank: int, world_size: int, case: Case, **options) -> tuple[nn.Module, nn.Module]:
    """Returns both models after the last step."""
    setup = Setup(make=case.make, predicate=case.predicate, layers=layers_of, **options)
    model, optimizer, reference = setup.build(mesh)
    assert sum(not param.elementwise for param in dmuon.get_dedicated_params(model)) == case.matrices
    for step in range(STEPS):
        loss = loss_of(model, case, step, rank, mesh.device_type)
        loss.backward()
        losses = [loss_of(reference, case, step, r, mesh.device_type) for r in range(world_size)]
        torch.testing.assert_close(loss.detach(), losses[rank].detach(), rtol=1e-5, atol=1e-6)
        reference.backward(losses, world_size)
        assert_same(model, reference, 1e-5, grads=True)
        optimizer.step()
        reference.step()
        # On CUDA Newton-Schulz runs in fp16, and an adapter that starts at zero consists of updates alone.
        assert_same(model, reference, 1e-5 if mesh.device_type == "cpu" else 1e-2)
        check_invariants(model)
        optimizer.zero_grad()
        reference.zero_grad()
        if mesh.device_type != "cpu":
            align(model, reference)
    return model, reference.model


@pytest.mark.parametrize("z3", [True, False], ids=["z3", "z2"])
@pytest.mark.parametrize("name", CASES)
def test_model(mesh, rank, world_size, name, z3):
    train(mesh, rank, world_size, CASES[name], z3=z3)


@pytest.mark.parametrize("name", CASES)
def test_model_without_fully_shard(mesh, rank, world_size, name):
    """Embeddings, norms, biases, stacks of experts and convolutions are elementwise parameters."""
    model, _ = train(mesh, rank, world_size, CASES[name], recipe="c")
    assert len(dmuon.get_dedicated_params(model)) == len(list(model.parameters()))


@pytest.mark.parametrize("name", ["llama_tied", "t5", "llava"])
def test_model_with_fully_shard_on_the_root_only(mesh, rank, world_size, name):
    train(mesh, rank, world_size, CASES[name], recipe="b")


@pytest.mark.parametrize("reentrant", [True, False])
def test_gradient_checkpointing_of_transformers(mesh, rank, world_size, reentrant):
    """A layer checkpoints its own forward, inside its hooks, and gets most of its inputs as keywords."""

    def make() -> nn.Module:
        model = llama(use_cache=False)
        name = "activation_checkpointing_enable"  # its name since transformers 5
        enable = getattr(model, name, None) or model.gradient_checkpointing_enable
        enable({"use_reentrant": reentrant})
        if reentrant:
            model.enable_input_require_grads()
        return model

    train(mesh, rank, world_size, Case(make, text, in_layers, 14), recipe="b")


def test_generation_after_training(mesh, rank, world_size):
    """The cache that the layers fill is the one the model holds; every rank generates the same number of tokens."""
    model, plain = train(mesh, rank, world_size, CASES["llama"])
    prompt = tokens(torch.Generator().manual_seed(rank), 5).to(mesh.device_type)
    options = {"max_new_tokens": 6, "min_new_tokens": 6, "do_sample": False, "pad_token_id": 0}
    assert torch.equal(model.generate(prompt, **options), plain.generate(prompt, **options))


def llama_with_lora() -> nn.Module:
    peft = pytest.importorskip("peft", reason="the adapters are peft's")
    targets = ["q_proj", "k_proj", "v_proj", "o_proj", "down_proj"]
    return peft.get_peft_model(llama(), peft.LoraConfig(r=4, lora_dropout=0.0, target_modules=targets))


def is_adapter(name: str, parameter: nn.Parameter) -> bool:
    return "lora_" in name


@pytest.mark.parametrize(
    "predicate,matrices", [(is_adapter, 20), (in_layers, 34)], ids=["adapters", "adapters_and_frozen_base"]
)
def test_lora(mesh, rank, world_size, predicate, matrices):
    """In the first step one half of every adapter has a gradient of zeros."""
    train(mesh, rank, world_size, Case(llama_with_lora, text, predicate, matrices))


class Encoder(nn.Module):
    def __init__(self, width: int, layers: int) -> None:
        super().__init__()
        options = {"dim_feedforward": 48, "dropout": 0.0, "batch_first": True, "norm_first": True, "bias": False}
        self.layers = nn.ModuleList([nn.TransformerEncoderLayer(width, 4, **options) for _ in range(layers)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


@dataclass
class Actions(transformers.utils.ModelOutput):
    """FSDP2 finds no tensors in a dataclass that is not registered with pytree, as this one is."""

    loss: torch.Tensor | None = None
    chunk: torch.Tensor | None = None


class VisionLanguageAction(nn.Module):
    """Two stacks of layers, the first used once for each camera, and a small head outside of both."""

    def __init__(self) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, 32, 4, 4)
        self.vision = Encoder(32, 2)
        self.projector = nn.Linear(32, 40)
        self.embedding = nn.Embedding(VOCAB, 40)
        self.language = Encoder(40, 2)
        self.action_head = nn.Sequential(nn.Linear(40, 16), nn.GELU(), nn.Linear(16, 7))

    def forward(self, cameras: torch.Tensor, input_ids: torch.Tensor, actions: torch.Tensor) -> Actions:
        seen = [self.vision(self.patches(camera).flatten(2).mT) for camera in cameras.unbind(1)]
        words = self.embedding(input_ids)
        x = self.language(torch.cat([self.projector(torch.cat(seen, dim=1)), words], dim=1))
        chunk = self.action_head(x[:, -actions.shape[1] :])
        return Actions(loss=F.mse_loss(chunk, actions), chunk=chunk)


def demonstrations(generator: torch.Generator) -> Inputs:
    cameras = torch.stack([images(generator), images(generator)], dim=1)
    actions = torch.randn(4, 5, 7, generator=generator)
    return {"cameras": cameras, "input_ids": tokens(generator), "actions": actions}


def in_layers_or_head(name: str, parameter: nn.Parameter) -> bool:
    """The head's matrices are groups of their own: no layer is around them."""
    return in_layers(name, parameter) or name in ("action_head.0.weight", "action_head.2.weight")


@pytest.mark.parametrize("z3", [True, False], ids=["z3", "z2"])
def test_vision_language_action_model(mesh, rank, world_size, z3):
    train(mesh, rank, world_size, Case(VisionLanguageAction, demonstrations, in_layers_or_head, 18), z3=z3)

"""MODEL_CARD.md: what the bundled model is, out of the figures that were measured."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from colibri import LLM

SCHEMA = "colibri-card-1"
CARD = "MODEL_CARD.md"
FIGURES = "card.json"

PROMPTS: Mapping[str, str] = {
    "bible": "And it came to pass in those days, that",
    "shakespeare": "HAMLET.\nMy lord, I have",
    "melville": "The whale rose slowly from the sea, and",
    "austen": "She was very glad to hear that Mr. Elliot",
    "speeches": "The Congress of the United States should",
    "python": "    def __init__(self, name, value=None):\n        ",
    "german": "Um das Paket zu installieren, müssen Sie",
    "french": "Pour installer le paquet, vous devez",
}
"""An opening for each domain."""

_SAMPLE = 60
_SEED = 7


def continuations(llm: LLM) -> dict[str, str]:
    """What the model makes of each opening, with its own sampling values."""
    return {
        name: llm.generate(prompt, max_tokens=_SAMPLE, seed=_SEED, ignore_eos=True).text or ""
        for name, prompt in PROMPTS.items()
    }


def text(figures: Mapping[str, Any], experts: str, shown: Mapping[str, str]) -> str:
    """The whole card."""
    parts = (_what(figures), _sources(figures), _recipe(figures), _measured(figures))
    samples = "\n".join(
        f"**{name}**\n\n````text\n{PROMPTS[name]}⟶{continued.rstrip()}\n````\n"
        for name, continued in shown.items()
    )
    return "\n".join(
        [
            "# The bundled demo model\n",
            *parts,
            "## Experts by domain\n",
            "The three experts of each layer that serve a domain most, with that domain's share of "
            "their load when all domains have equally many tokens (`experts.json` has them "
            "all).\n",
            experts,
            "## Samples\n",
            f"One continuation of each opening with the model's own sampling values, seed {_SEED}; "
            "the arrow marks where it begins. None was chosen.\n",
            samples,
        ]
    )


def _what(figures: Mapping[str, Any]) -> str:
    model, formats = figures["model"], figures["formats"]
    return (
        "A small Mixture-of-Experts model that continues text. It is no assistant: it knows eight "
        "kinds of text, follows no instructions, and what it says is not true. It is here so that "
        "Colibri can be tried, tested and measured without a download.\n\n"
        "| | |\n|---|---|\n"
        f"| layout | `{model['family']}`, {model['num_layers']} layers, {model['num_experts']} "
        f"experts a layer, {model['num_experts_per_tok']} a token |\n"
        f"| parameters | {model['num_parameters'] / 1e6:.1f} M, "
        f"{model['num_active_parameters'] / 1e6:.1f} M active |\n"
        f"| vocabulary | {model['vocab_size']:,} byte-level BPE |\n"
        f"| context | {model['max_position_embeddings']:,} tokens |\n"
        f"| formats | experts {formats['experts']}, dense {formats['dense']} |\n"
    )


def _sources(figures: Mapping[str, Any]) -> str:
    rows = [
        f"| {name} | {source['title']} | {', '.join(f'`{p}`' for p in source['packages'])} "
        f"| {source['licence']} | {source['train']['tokens']:,} | {source['heldout']['tokens']:,} |"
        for name, source in figures["sources"].items()
    ]
    return "\n".join(
        [
            "## Sources and licences\n",
            "The text itself is not part of the package.\n",
            "| domain | text | packages | licence | tokens trained on | held out |",
            "|---|---|---|---|---|---|",
            *rows,
            "",
        ]
    )


def _recipe(figures: Mapping[str, Any]) -> str:
    training = figures["training"]
    steps, seconds, tokens = training["counters"]
    values = ", ".join(f"`{name}` {value}" for name, value in training["recipe"].items())
    return (
        "## Recipe\n\n"
        f"`python tools/train_demo.py corpus`, then `train`, then `bundle`. {steps:,.0f} steps, "
        f"{tokens / 1e6:.1f} M tokens, {seconds / 60:.0f} minutes on two cores. "
        f"The coefficient of the load-balancing loss is {training['recipe']['balance']}.\n\n"
        f"All values: {values}.\n"
    )


def _measured(figures: Mapping[str, Any]) -> str:
    balance, knocked, samples = figures["balance"], figures["knock_out"], figures["samples"]
    rows = [
        "| {} | {:.3f} | {:.2f} | {:.2f} | {:.2f} | {:.4f} |".format(
            name,
            row["loss"]["trained"],
            row["perplexity"]["trained"],
            row["perplexity"]["container"],
            row["perplexity"]["ngram"],
            row["kl"],
        )
        for name, row in figures["held_out"].items()
    ]
    scored = sum(row["scored_tokens"] for row in figures["held_out"].values())
    return "\n".join(
        [
            "## Measured on held-out text\n",
            f"A tenth of every domain was held out; {scored:,} tokens of it are scored, each after "
            "at least 512 others. Loss and KL(trained ‖ container) in nats a token; perplexities "
            "are a token's. The 5-gram model is interpolated (modified Kneser-Ney) and trained on "
            "the same tokens.\n",
            "| domain | loss | perplexity, trained | container | 5-gram | KL |",
            "|---|---|---|---|---|---|",
            *rows,
            "",
            f"* The container costs {figures['mean_kl']:.4f} nats a token against the trained "
            "float32 weights, as the mean over the domains.",
            f"* Load of the experts: coefficient of variation "
            f"{balance['mean_coefficient_of_variation']:.3f} within a layer over all domains "
            f"({balance['within_domain_coefficient_of_variation']:.2f} within one domain); the "
            f"heaviest has {balance['max_over_mean']:.2f}, the lightest "
            f"{balance['min_over_mean']:.2f} of the mean; an expert serves "
            f"{balance['domains_an_expert_serves']:.1f} of {len(rows)} domains "
            "(exponential of the entropy of its load).",
            f"* Barring a domain's {knocked['pairs']} most used experts costs more than barring as "
            f"many others of equal heat in {knocked['won']} of {knocked['of']} domains.",
            f"* A bag-of-words classifier puts {samples['right']} of {samples['number']} samples "
            f"of 100 tokens into the domain they were prompted from (and "
            f"{samples['right_for_real_text']} of the real continuations).",
            "",
        ]
    )

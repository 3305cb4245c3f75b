"""The family of a network by its name: architecture family, kind, and one name for all names of the network."""

import functools
import re
from dataclasses import dataclass

from precision_time.predictor.shipped import shipped_rows

__all__ = ["ATTENTION_KINDS", "KINDS", "Family", "find_family", "fold_name", "guess_kind"]

#: What a model does and is made of; coarser than the family.
KINDS = (
    "cnn", "vision_transformer", "hybrid_vision", "mlp_vision", "detection", "segmentation", "language_encoder",
    "language_decoder", "mixture_of_experts", "sequence_to_sequence", "recurrent", "speech", "recommendation",
    "diffusion", "graph", "tabular/other",
)  # fmt: skip
#: Kinds that consist of attention and dense products.
ATTENTION_KINDS = frozenset(
    {"vision_transformer", "language_encoder", "language_decoder", "mixture_of_experts", "sequence_to_sequence"}
)

#: How to guess the family of a name that ``data/families.csv`` does not list. Each kind holds families, each family
#: the patterns that mean it after a colon; its own name is always a pattern.
_PATTERNS: dict[str, str] = {
    "cnn": "resnet:resnext,senet resnetv2 resnest res2net:res2next tresnet regnet efficientnet convnext convmixer"
    " mobilenet:mobilefacenet mnasnet:spnasnet densenet cspnet:cspdarknet,cspresne,cs3,darknet vgg inception xception"
    " shufflenet squeezenet dla dpn hrnet vovnet repvgg nasnet amoebanet mixnet ghostnet rexnet fbnet gernet"
    " hardcorenas lcnet tinynet selecsls gpunet",
    "hybrid_vision": "attention_resnet:botnet,botnext,halonet,halonext,lambda_resnet mobilevit levit convit poolformer"
    " edgenext visformer sequencer",
    "vision_transformer": "vit:deit,beit swin cait volo twins tnt pit nest",
    "mlp_vision": "mixer resmlp gmlp",
    "detection": "rcnn:faster_rcnn,mask_rcnn,keypoint_rcnn,cascade_rcnn,detectron,panoptic_fpn,rpn retinanet"
    " ssd:ssd_resnet efficientdet",
    "segmentation": "unet:nnunet vnet deeplab",
    "language_encoder": "bert electra",
    "language_decoder": "gpt mpt llama nemotron transformer_xl:transformerxl",
    "mixture_of_experts": "mixtral qwen_moe:qwen3_moe,qwen3_30b_a3b,qwen3_235b_a22b deepseek:kimi gpt_oss"
    " nemotron_h:nemotron_3",
    "sequence_to_sequence": "t5:mt5 transformer",
    "recurrent": "gnmt lstm gru",
    "speech": "tacotron waveglow hifigan fastspeech:fastpitch jasper:quartznet wav2vec2",
    "recommendation": "dlrm:dcnv2 ncf vae_cf",
    "diffusion": "stable_diffusion imagen",
    "graph": "moflow se3_transformer",
    "tabular/other": "tft mlp",
}
#: Patterns up to this length count only at the start of a word.
_SHORT_PATTERN = 3
#: A network without attention is recurrent when its recurrent layers take more than this share of the FLOPs.
_RECURRENT_SHARE = 0.1
#: A network with attention is a hybrid when its convolutions take at least this share of the FLOPs.
_HYBRID_SHARE = 0.5


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """A model's architecture family, its kind (one of ``KINDS``), and the one name for all names of its network."""

    family: str
    kind: str
    canonical: str


def fold_name(name: str) -> str:
    """``name`` in lower case, with an underscore for each dash, dot and blank."""
    return re.sub(r"[-. ]", "_", name.casefold())


@functools.cache
def _families() -> dict[str, Family]:
    families: dict[str, Family] = {}
    for row in shipped_rows("families.csv"):
        family = Family(family=row["family"], kind=row["kind"], canonical=row["canonical"])
        families[row["model"]] = family
        families.setdefault(fold_name(row["model"]), family)
    return families


@functools.cache
def _patterns() -> list[tuple[str, str, str]]:
    """(pattern, family, kind) of every pattern."""
    patterns = []
    for kind, families in _PATTERNS.items():
        for entry in families.split():
            family, _, more = entry.partition(":")
            patterns += [(pattern, family, kind) for pattern in (family, *more.split(",")) if pattern]
    return patterns


def find_family(model: str) -> Family | None:
    """The family of ``model``: as listed, else guessed from its name, else ``None``.

    The guess prefers a pattern at the start of the name to one inside it, and a longer pattern to a shorter one.
    """
    families = _families()
    folded = fold_name(model)
    if listed := families.get(model) or families.get(folded):
        return listed
    matches = [
        (folded.startswith(pattern), len(pattern), family, kind)
        for pattern, family, kind in _patterns()
        if folded.startswith(pattern)
        or f"_{pattern}" in folded
        or (pattern in folded and len(pattern) > _SHORT_PATTERN)
    ]
    if not matches:
        return None
    *_, family, kind = max(matches)
    return Family(family=family, kind=kind, canonical=folded)


def guess_kind(
    *, convolution_share: float, attends: bool, recurrent_share: float = 0.0, takes_tokens: bool = False
) -> str:
    """Guess the kind, one of ``KINDS``, of a network without a listed name from its shares of the forward FLOPs.

    ``attends`` says whether there is any attention: even in transformers it is only a few percent of the FLOPs.
    Counts do not show whether a language model is causal: it is called an encoder.
    """
    if attends:
        if takes_tokens:
            return "language_encoder"
        return "vision_transformer" if convolution_share < _HYBRID_SHARE else "hybrid_vision"
    if recurrent_share > _RECURRENT_SHARE:
        return "recurrent"
    return "cnn" if convolution_share >= _HYBRID_SHARE else "tabular/other"

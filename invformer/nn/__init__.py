"""Layers: contractive attention and feed-forward, ActivationNorm, invertible stacks, the model."""

from invformer.nn.activation_norm import ActivationNorm
from invformer.nn.attention import (
    ContractiveL2Attention,
    DotProductAttention,
    L2Attention,
    PaperContractiveL2Attention,
)
from invformer.nn.bounded_attention import BoundedAttention
from invformer.nn.branch import frozen_weights
from invformer.nn.certificate import Certificate, NoCertificateError, certify, enforce
from invformer.nn.channel_metric import ChannelMetric, loud_channels
from invformer.nn.feed_forward import ContractiveFeedForward, FeedForward
from invformer.nn.position_bias import CausalMask, RelativePositionBias, VisibilityMask
from invformer.nn.residual import InvertibleBlock, InvertibleResidual, MetricBlock
from invformer.nn.stack import InvertibleStack
from invformer.nn.transformer import CharEmbedding, CharTransformer, PreNormBlock, PreNormStack

__all__ = [
    "ActivationNorm",
    "BoundedAttention",
    "CausalMask",
    "Certificate",
    "ChannelMetric",
    "CharEmbedding",
    "CharTransformer",
    "ContractiveFeedForward",
    "ContractiveL2Attention",
    "DotProductAttention",
    "FeedForward",
    "InvertibleBlock",
    "InvertibleResidual",
    "InvertibleStack",
    "L2Attention",
    "MetricBlock",
    "NoCertificateError",
    "PaperContractiveL2Attention",
    "PreNormBlock",
    "PreNormStack",
    "RelativePositionBias",
    "VisibilityMask",
    "certify",
    "enforce",
    "frozen_weights",
    "loud_channels",
]

"""The supported checkpoint families, by the ``model_type`` of config.json. A new one is
one function (docs/extending/model_family.md)."""

from __future__ import annotations

from kvlathe.export.families.cohere import (
    cohere,
    cohere2,
    cohere2_moe,
    cohere_compass,
)
from kvlathe.export.families.delta import olmo_hybrid, qwen3_5, qwen3_5_moe, qwen3_next
from kvlathe.export.families.experts import (
    aria_text,
    flex_olmo,
    mellum,
    mixtral,
    olmoe,
    phimoe,
    qwen2_moe,
    qwen3_moe,
    qwen3_omni_moe,
    qwen3_vl_moe,
)
from kvlathe.export.families.falcon import falcon
from kvlathe.export.families.falcon_h1 import falcon_h1
from kvlathe.export.families.family import Experts, Family, Latent
from kvlathe.export.families.gemma import gemma, gemma2, gemma3, vaultgemma
from kvlathe.export.families.gemma3n import gemma3n
from kvlathe.export.families.gemma4 import gemma4, gemma4_unified
from kvlathe.export.families.gpt import codegen, gpt_bigcode, gpt_neo, gptj
from kvlathe.export.families.gpt2 import gpt2, openai_gpt
from kvlathe.export.families.gpt_oss import gpt_oss
from kvlathe.export.families.granite import (
    granite,
    granite_swa,
    granitemoe,
    granitemoe_swa,
    granitemoeshared,
    hyperclovax,
)
from kvlathe.export.families.hunyuan import hunyuan, hunyuan_moe
from kvlathe.export.families.latent import (
    axk1,
    deepseek_ocr2,
    deepseek_v2,
    deepseek_v3,
    deepseek_v32,
    glm4_moe_lite,
    minicpm3,
    mistral4,
    youtu,
)
from kvlathe.export.families.llama import llama, mllama
from kvlathe.export.families.llama4 import llama4
from kvlathe.export.families.llama_like import (
    apertus,
    arcee,
    cwm,
    ernie,
    helium,
    internlm2,
    jais2,
    ministral,
    ministral3,
    mistral,
    nanochat,
    nemotron,
    olmo,
    paddleocr_vl,
    seed_oss,
    smollm3,
    starcoder2,
)
from kvlathe.export.families.mimo import mimo_v2_flash
from kvlathe.export.families.nemotron_h import nemotron_h
from kvlathe.export.families.norms_after import (
    exaone4,
    glm,
    glm4,
    glm4v,
    glm_ocr,
    olmo2,
    olmo3,
)
from kvlathe.export.families.older import (
    biogpt,
    gpt_neox,
    gpt_neox_japanese,
    opt,
    persimmon,
    phi,
    xglm,
)
from kvlathe.export.families.other_names import OTHER_NAMES, RECORD, as_known
from kvlathe.export.families.parts import TEXT_PARTS, TextPart
from kvlathe.export.families.phi3 import phi3, phi4_multimodal
from kvlathe.export.families.qwen import qwen2, qwen3, qwen3_vl
from kvlathe.export.families.sigmoid_experts import (
    afmoe,
    dots1,
    ernie4_5_moe,
    ernie4_5_vl_moe,
    exaone_moe,
    flint,
    glm4_moe,
    hy_v3,
    kolibri1,
    laguna,
    minimax_m2,
    minimax_m3,
    solar_open,
    step3p5,
)
from kvlathe.export.families.spaces import bamba, granitemoehybrid
from kvlathe.export.families.stablelm import stablelm
from kvlathe.export.families.stateful import lfm2, lfm2_moe, lfm3

FAMILIES = {
    "afmoe": afmoe,
    "apertus": apertus,
    "arcee": arcee,
    "aria_text": aria_text,
    "axk1": axk1,
    "bamba": bamba,
    "biogpt": biogpt,
    "codegen": codegen,
    "cohere": cohere,
    "cohere2": cohere2,
    "cohere2_moe": cohere2_moe,
    "cohere_compass_text": cohere_compass,
    "cwm": cwm,
    "deepseek_ocr2_text": deepseek_ocr2,
    "deepseek_v2": deepseek_v2,
    "deepseek_v3": deepseek_v3,
    "deepseek_v32": deepseek_v32,
    "dots1": dots1,
    "emu3_text_model": llama,
    "ernie4_5": ernie,
    "ernie4_5_moe": ernie4_5_moe,
    "ernie4_5_vl_moe_text": ernie4_5_vl_moe,
    "exaone4": exaone4,
    "exaone_moe": exaone_moe,
    "falcon": falcon,
    "falcon_h1": falcon_h1,
    "flex_olmo": flex_olmo,
    "flint": flint,
    "gemma": gemma,
    "gemma2": gemma2,
    "gemma3_text": gemma3,
    "gemma3n_text": gemma3n,
    "gemma4_text": gemma4,
    "gemma4_unified_text": gemma4_unified,
    "glm": glm,
    "glm4": glm4,
    "glm4_moe": glm4_moe,
    "glm4v_moe_text": glm4_moe,
    "glm4v_text": glm4v,
    "glm_moe_dsa": deepseek_v32,
    "glm_ocr_text": glm_ocr,
    "granite_docling_text": granite,
    "paddleocr_vl_text": paddleocr_vl,
    "qwen3_vl_moe_text": qwen3_vl_moe,
    "glm4_moe_lite": glm4_moe_lite,
    "gpt2": gpt2,
    "gpt_bigcode": gpt_bigcode,
    "gpt_neo": gpt_neo,
    "gpt_neox": gpt_neox,
    "gpt_neox_japanese": gpt_neox_japanese,
    "gpt_oss": gpt_oss,
    "gptj": gptj,
    "granite": granite,
    "granite_swa": granite_swa,
    "granitemoe": granitemoe,
    "granitemoe_swa": granitemoe_swa,
    "granitemoehybrid": granitemoehybrid,
    "granitemoeshared": granitemoeshared,
    "helium": helium,
    "hunyuan_v1_dense": hunyuan,
    "hunyuan_v1_moe": hunyuan_moe,
    "hunyuan_vl_text": hunyuan,
    "hy_v3": hy_v3,
    "hyperclovax": hyperclovax,
    "internlm2": internlm2,
    "internlm3": llama,
    "iquestcoder": llama,
    "jais2": jais2,
    "kolibri1": kolibri1,
    "laguna": laguna,
    "lfm2": lfm2,
    "lfm2_moe": lfm2_moe,
    "lfm3": lfm3,
    "llama": llama,
    "llama4_text": llama4,
    "mellum": mellum,
    "mimo_v2_flash": mimo_v2_flash,
    "minicpm3": minicpm3,
    "minimax_m2": minimax_m2,
    "minimax_m3_vl_text": minimax_m3,
    "ministral": ministral,
    "ministral3": ministral3,
    "mistral": mistral,
    "mistral4": mistral4,
    "mixtral": mixtral,
    "mllama_text_model": mllama,
    "nanochat": nanochat,
    "nemotron": nemotron,
    "nemotron_h": nemotron_h,
    "olmo": olmo,
    "olmo2": olmo2,
    "olmo3": olmo3,
    "olmo_hybrid": olmo_hybrid,
    "olmoe": olmoe,
    "openai-gpt": openai_gpt,
    "opt": opt,
    "persimmon": persimmon,
    "phi": phi,
    "phi3": phi3,
    "phi4_multimodal": phi4_multimodal,
    "phimoe": phimoe,
    "qwen2": qwen2,
    "qwen2_5_omni_text": qwen2,
    "qwen2_5_vl_text": qwen2,
    "qwen2_moe": qwen2_moe,
    "qwen2_vl_text": qwen2,
    "qwen3": qwen3,
    "qwen3_5_moe_text": qwen3_5_moe,
    "qwen3_5_text": qwen3_5,
    "qwen3_moe": qwen3_moe,
    "qwen3_next": qwen3_next,
    "qwen3_omni_moe_text": qwen3_omni_moe,
    "qwen3_vl_text": qwen3_vl,
    "seed_oss": seed_oss,
    "smollm3": smollm3,
    "solar_open": solar_open,
    "stablelm": stablelm,
    "starcoder2": starcoder2,
    "step3p5": step3p5,
    "vaultgemma": vaultgemma,
    "xglm": xglm,
    "youtu": youtu,
}
SUPPORTED = tuple(sorted({*FAMILIES, *TEXT_PARTS, *OTHER_NAMES}))
"""Model types that are read: those with a record, and those of which a part has one."""

__all__ = [
    "FAMILIES",
    "OTHER_NAMES",
    "RECORD",
    "SUPPORTED",
    "TEXT_PARTS",
    "Experts",
    "Family",
    "Latent",
    "TextPart",
    "as_known",
]

"""scripts/kernel_code.py tells a change of machine code from a change of names."""

from __future__ import annotations

from scripts.kernel_code import compared, kernels_of

DUMP = """
Fatbin elf code:
	.target	sm_90a

		Function : {name}
	.headerflags	@"EF_CUDA_SM90"
        /*0000*/                   LDC R1, c[0x0][0x28] ;   /* 0x00000a00ff017b82 */
                                                            /* 0x000fe20000000800 */
        /*0010*/                   {instruction} ;          /* 0x0000820000087ab9 */
                                                            /* 0x000fce0000000a00 */
"""


def dumped(name: str, instruction: str = "EXIT") -> list[str]:
    return DUMP.format(name=name, instruction=instruction).splitlines()


def test_the_same_code_under_another_name_is_the_same() -> None:
    old = kernels_of(dumped("seal_pages"))
    new = kernels_of(dumped("seal_rows"))
    assert compared(old, old, {}) == []
    assert compared(old, new, {"seal_pages": "seal_rows"}) == []
    assert compared(old, new, {}) == [
        "gone     sm_90a: seal_pages",
        "new      sm_90a: seal_rows",
    ]


def test_one_other_instruction_is_a_change_of_a_kernel() -> None:
    old = kernels_of(dumped("seal_pages"))
    new = kernels_of(dumped("seal_pages", "NOP"))
    assert compared(old, new, {}) == [
        "changed  sm_90a: seal_pages: 2 -> 2 instructions"
    ]

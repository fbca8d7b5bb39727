/* One trampoline for each function of symbols.inc: it jumps through its entry,
 * with every argument still in place. */

	.macro FUNCTION name
	.text
	.balign	16
	.globl	\name
	.hidden	\name
	.type	\name, %function
\name:
	adrp	x16, .Lentry_\name
	add	x16, x16, :lo12:.Lentry_\name
	ldr	x17, [x16]
	br	x17
	.size	\name, . - \name

	.section .rodata.euryale_cuda, "a", %progbits
.Lname_\name:
	.asciz	"\name"

	.section .data.rel.euryale_cuda, "aw", %progbits
	.balign	16
.Lentry_\name:
	.quad	resolve
	.quad	.Lname_\name
	.endm

/* Where an entry leads at first: look the function up, then go there. The entry
 * is in x16. */
	.text
	.balign	16
	.type	resolve, %function
resolve:
	stp	x29, x30, [sp, #-224]!
	mov	x29, sp
	stp	x0, x1, [sp, #16]
	stp	x2, x3, [sp, #32]
	stp	x4, x5, [sp, #48]
	stp	x6, x7, [sp, #64]
	str	x8, [sp, #80]
	stp	q0, q1, [sp, #96]
	stp	q2, q3, [sp, #128]
	stp	q4, q5, [sp, #160]
	stp	q6, q7, [sp, #192]
	mov	x0, x16
	bl	euryale_cuda_resolve
	mov	x17, x0
	ldp	x0, x1, [sp, #16]
	ldp	x2, x3, [sp, #32]
	ldp	x4, x5, [sp, #48]
	ldp	x6, x7, [sp, #64]
	ldr	x8, [sp, #80]
	ldp	q0, q1, [sp, #96]
	ldp	q2, q3, [sp, #128]
	ldp	q4, q5, [sp, #160]
	ldp	q6, q7, [sp, #192]
	ldp	x29, x30, [sp], #224
	br	x17
	.size	resolve, . - resolve

#include "symbols.inc"

	.section .note.GNU-stack, "", %progbits

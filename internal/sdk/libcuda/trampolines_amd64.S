/* One trampoline for each function of symbols.inc: it jumps through its entry,
 * with every argument still in place. */

	.macro FUNCTION name
	.text
	.balign	16
	.globl	\name
	.hidden	\name
	.type	\name, @function
\name:
	endbr64
	leaq	.Lentry_\name(%rip), %r11
	jmp	*(%r11)
	.size	\name, . - \name

	.section .rodata.euryale_cuda, "a", @progbits
.Lname_\name:
	.asciz	"\name"

	.section .data.rel.euryale_cuda, "aw", @progbits
	.balign	16
.Lentry_\name:
	.quad	resolve
	.quad	.Lname_\name
	.endm

/* Where an entry leads at first: look the function up, then go there. The entry
 * is in %r11. */
	.text
	.balign	16
	.type	resolve, @function
resolve:
	endbr64
	pushq	%rbp
	movq	%rsp, %rbp
	subq	$192, %rsp
	movq	%rdi, 0(%rsp)
	movq	%rsi, 8(%rsp)
	movq	%rdx, 16(%rsp)
	movq	%rcx, 24(%rsp)
	movq	%r8, 32(%rsp)
	movq	%r9, 40(%rsp)
	movups	%xmm0, 64(%rsp)
	movups	%xmm1, 80(%rsp)
	movups	%xmm2, 96(%rsp)
	movups	%xmm3, 112(%rsp)
	movups	%xmm4, 128(%rsp)
	movups	%xmm5, 144(%rsp)
	movups	%xmm6, 160(%rsp)
	movups	%xmm7, 176(%rsp)
	movq	%r11, %rdi
	call	euryale_cuda_resolve
	movq	%rax, %r11
	movq	0(%rsp), %rdi
	movq	8(%rsp), %rsi
	movq	16(%rsp), %rdx
	movq	24(%rsp), %rcx
	movq	32(%rsp), %r8
	movq	40(%rsp), %r9
	movups	64(%rsp), %xmm0
	movups	80(%rsp), %xmm1
	movups	96(%rsp), %xmm2
	movups	112(%rsp), %xmm3
	movups	128(%rsp), %xmm4
	movups	144(%rsp), %xmm5
	movups	160(%rsp), %xmm6
	movups	176(%rsp), %xmm7
	leave
	jmp	*%r11
	.size	resolve, . - resolve

#include "symbols.inc"

	.section .note.GNU-stack, "", @progbits

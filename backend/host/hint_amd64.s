#include "textflag.h"

// func pause()
TEXT ·pause(SB), NOSPLIT, $0-0
	PAUSE
	RET

// func fetchToWrite(p unsafe.Pointer, nbytes int)
TEXT ·fetchToWrite(SB), NOSPLIT, $0-16
	MOVQ p+0(FP), AX
	MOVQ nbytes+8(FP), CX
	ADDQ AX, CX

line:
	BYTE $0x0F; BYTE $0x0D; BYTE $0x08 // PREFETCHW (AX), which the assembler does not know
	ADDQ $64, AX
	CMPQ AX, CX
	JLT  line
	RET

// func fetchToRead(p unsafe.Pointer)
TEXT ·fetchToRead(SB), NOSPLIT, $0-8
	MOVQ p+0(FP), AX
	PREFETCHT0 (AX)
	RET

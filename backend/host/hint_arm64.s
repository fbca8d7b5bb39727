#include "textflag.h"

// func pause()
TEXT ·pause(SB), NOSPLIT, $0-0
	YIELD
	YIELD
	YIELD
	YIELD
	RET

// func fetchToWrite(p unsafe.Pointer, nbytes int)
TEXT ·fetchToWrite(SB), NOSPLIT, $0-16
	MOVD p+0(FP), R0
	MOVD nbytes+8(FP), R1
	ADD  R0, R1

line:
	PRFM (R0), PSTL1KEEP
	ADD  $64, R0
	CMP  R1, R0
	BLT  line
	RET

// func fetchToRead(p unsafe.Pointer)
TEXT ·fetchToRead(SB), NOSPLIT, $0-8
	MOVD p+0(FP), R0
	PRFM (R0), PLDL1KEEP
	RET

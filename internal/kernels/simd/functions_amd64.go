package simd

func unary[T Float](l Level, op Op, dst, x *T, n int) bool {
	switch d := any(dst).(type) {
	case *float32:
		switch x := any(x).(*float32); l {
		case AVX512:
			return unaryF32AVX512(op, d, x, n)
		case AVX2:
			return unaryF32AVX2(op, d, x, n)
		}
	case *float64:
		switch x := any(x).(*float64); l {
		case AVX512:
			return unaryF64AVX512(op, d, x, n)
		case AVX2:
			return unaryF64AVX2(op, d, x, n)
		}
	}
	return false
}

func binary[T Float](l Level, op Op, dst, x, y *T, xstep, ystep, n int) bool {
	switch d := any(dst).(type) {
	case *float32:
		switch x, y := any(x).(*float32), any(y).(*float32); l {
		case AVX512:
			return binaryF32AVX512(op, d, x, y, xstep, ystep, n)
		case AVX2:
			return binaryF32AVX2(op, d, x, y, xstep, ystep, n)
		}
	case *float64:
		switch x, y := any(x).(*float64), any(y).(*float64); l {
		case AVX512:
			return binaryF64AVX512(op, d, x, y, xstep, ystep, n)
		case AVX2:
			return binaryF64AVX2(op, d, x, y, xstep, ystep, n)
		}
	}
	return false
}

func where[T Float](l Level, dst, c, x, y *T, cstep, xstep, ystep, n int) bool {
	switch d := any(dst).(type) {
	case *float32:
		switch c, x, y := any(c).(*float32), any(x).(*float32), any(y).(*float32); l {
		case AVX512:
			whereF32AVX512(d, c, x, y, cstep, xstep, ystep, n)
		case AVX2:
			whereF32AVX2(d, c, x, y, cstep, xstep, ystep, n)
		}
	case *float64:
		switch c, x, y := any(c).(*float64), any(x).(*float64), any(y).(*float64); l {
		case AVX512:
			whereF64AVX512(d, c, x, y, cstep, xstep, ystep, n)
		case AVX2:
			whereF64AVX2(d, c, x, y, cstep, xstep, ystep, n)
		}
	}
	return l > Go
}

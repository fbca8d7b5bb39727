package simd

func sum[T Float](l Level, x *T, n int) float64 {
	switch x := any(x).(type) {
	case *float32:
		if l == AVX512 {
			return sumF32AVX512(x, n)
		}
		return sumF32AVX2(x, n)
	case *float64:
		if l == AVX512 {
			return sumF64AVX512(x, n)
		}
		return sumF64AVX2(x, n)
	}
	panic("simd: sum of an unknown type")
}

func extreme[T Float](l Level, greatest bool, x *T, n int) T {
	switch x := any(x).(type) {
	case *float32:
		switch {
		case l == AVX512 && greatest:
			return T(maxF32AVX512(x, n))
		case l == AVX512:
			return T(minF32AVX512(x, n))
		case greatest:
			return T(maxF32AVX2(x, n))
		}
		return T(minF32AVX2(x, n))
	case *float64:
		switch {
		case l == AVX512 && greatest:
			return T(maxF64AVX512(x, n))
		case l == AVX512:
			return T(minF64AVX512(x, n))
		case greatest:
			return T(maxF64AVX2(x, n))
		}
		return T(minF64AVX2(x, n))
	}
	panic("simd: extreme of an unknown type")
}

func accumulate[T Float](l Level, sums *float64, x *T, n int) {
	switch x := any(x).(type) {
	case *float32:
		if l == AVX512 {
			accumulateF32AVX512(sums, x, n)
			return
		}
		accumulateF32AVX2(sums, x, n)
	case *float64:
		if l == AVX512 {
			accumulateF64AVX512(sums, x, n)
			return
		}
		accumulateF64AVX2(sums, x, n)
	}
}

func spread[T Float](l Level, dst, x *T, rows, n int) {
	switch d := any(dst).(type) {
	case *float32:
		if x := any(x).(*float32); l == AVX512 {
			spreadF32AVX512(d, x, rows, n)
		} else {
			spreadF32AVX2(d, x, rows, n)
		}
	case *float64:
		if x := any(x).(*float64); l == AVX512 {
			spreadF64AVX512(d, x, rows, n)
		} else {
			spreadF64AVX2(d, x, rows, n)
		}
	}
}

package simd

import (
	"math"
	"math/bits"
)

// nearAngle is up to where package math reduces angles by subtractions, which keep the digits of
// results near 0. Beyond, it loses some.
const nearAngle = 1 << 29

func sine(x float64) float64 {
	if !(math.Abs(x) > nearAngle && math.Abs(x) <= math.MaxFloat64) {
		return math.Sin(x)
	}
	quarter, r := farAngle(x)
	return wave(quarter, r)
}

func cosine(x float64) float64 {
	if !(math.Abs(x) > nearAngle && math.Abs(x) <= math.MaxFloat64) {
		return math.Cos(x)
	}
	quarter, r := farAngle(x)
	return wave(quarter+1, r)
}

// wave returns sin(quarter*pi/2 + r).
func wave(quarter int, r float64) float64 {
	switch quarter & 3 {
	case 1:
		return math.Cos(r)
	case 2:
		return -math.Sin(r)
	case 3:
		return -math.Cos(r)
	}
	return math.Sin(r)
}

// farAngle returns x = quarter*pi/2 + r with |r| <= pi/4, of a finite |x| of at least 2, by Payne
// and Hanek (Radian reduction for trigonometric functions, 1983): 128 bits of x * 4/pi, of which
// the multiples of 8 are left out.
func farAngle(x float64) (quarter int, r float64) {
	b := math.Float64bits(x)
	m, place := b&(1<<52-1)|1<<52, uint(b>>52&0x7ff)-1075+61
	var z [3]uint64
	for i := range z {
		digit, shift := int(place/64)+i, place%64
		z[i] = fourOverPi(digit)<<shift | fourOverPi(digit+1)>>(64-shift)
	}
	below, _ := bits.Mul64(z[2], m)
	high, low := bits.Mul64(z[1], m)
	lo, carry := bits.Add64(low, below, 0)
	hi := z[0]*m + high + carry
	eighths := int(hi >> 61)
	hi, lo = hi<<3|lo>>61, lo<<3
	odd := eighths&1 == 1 // the next multiple of pi/2 is nearer
	if odd {
		var borrow uint64
		lo, borrow = bits.Sub64(0, lo, 0)
		hi, _ = bits.Sub64(0, hi, borrow)
		eighths++
	}
	quarter, r = eighths/2, (float64(hi)*0x1p-64+float64(lo)*0x1p-128)*(math.Pi/4)
	if odd {
		r = -r
	}
	if x < 0 {
		return -quarter, -r
	}
	return quarter, r
}

// fourOverPi returns word k of 4/pi, of which word 0 is its integer.
//
// Origin: own, the digits of 4/pi
func fourOverPi(k int) uint64 {
	return [...]uint64{
		0x0000000000000001, 0x45f306dc9c882a53, 0xf84eafa3ea69bb81, 0xb6c52b3278872083,
		0xfca2c757bd778ac3, 0x6e48dc74849ba5c0, 0x0c925dd413a32439, 0xfc3bd63962534e7d,
		0xd1046bea5d768909, 0xd338e04d68befc82, 0x7323ac7306a673e9, 0x3908bf177bf25076,
		0x3ff12fffbc0b301f, 0xde5e2316b414da3e, 0xda6cfd9e4f96136e, 0x9e8c7ecd3cbfd45a,
		0xea4f758fd7cbe2f6, 0x7a0e73ef14a525d4, 0xd7f6bf623f1aba10, 0xac06608df8f6d757,
	}[k]
}

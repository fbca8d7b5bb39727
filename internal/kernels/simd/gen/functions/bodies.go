package main

import (
	"math"

	. "github.com/mmcloughlin/avo/operand"
)

// The polynomials are minimax, by Remez' algorithm in 60 digits, and then rounded to the type.

// functions lists what is written, with the meaning of package fuse.
func functions() []function {
	list := []function{
		unary("neg", func(v *vectors, x vec) vec { return v.xor(x, v.sign()) }),
		unary("abs", (*vectors).abs),
		unary("sign", func(v *vectors, x vec) vec {
			d := v.choose(v.compare(less, x, v.number(0)), v.number(-1), x)
			return v.choose(v.greater(x, 0), v.number(1), d)
		}),
		unary("square", func(v *vectors, x vec) vec { return v.mul(x, x) }),
		unary("cube", func(v *vectors, x vec) vec { return v.mul(v.mul(x, x), x) }),
		unary("relu", func(v *vectors, x vec) vec {
			return v.choose(v.compare(less, x, v.number(0)), v.number(0), x)
		}),
		unary("inv", func(v *vectors, x vec) vec { return v.div(v.set(v.number(1)), x) }),
		unary("sqrt", (*vectors).sqrt),
		unary("invsqrt", func(v *vectors, x vec) vec {
			return v.div(v.set(v.number(1)), v.sqrt(x))
		}),
		unary("ceil", func(v *vectors, x vec) vec { return v.round(x, up) }),
		unary("floor", func(v *vectors, x vec) vec { return v.round(x, down) }),
		long("exp", (*vectors).exp),
		long("expm1", func(v *vectors, x vec) vec { return v.signed(v.expm1(x), x) }),
		long("log", func(v *vectors, x vec) vec {
			m, k := v.split(x)
			return v.logarithmOf(x, v.addPowers(v.logarithm(m), k))
		}),
		long("log2", func(v *vectors, x vec) vec {
			m, k := v.split(x)
			return v.logarithmOf(x, v.scaleAdd(v.logarithm(m).combined(v), v.number(1/math.Ln2), k))
		}),
		long("log1p", func(v *vectors, x vec) vec { return v.signed(v.log1p(x), x) }),
		long("tanh", (*vectors).tanh),
		long("sigmoid", (*vectors).sigmoid),
		long("softplus", (*vectors).softplus),
		binary("add", func(v *vectors, x, y vec) vec { return v.add(x, y) }),
		binary("sub", func(v *vectors, x, y vec) vec { return v.sub(x, y) }),
		binary("mul", func(v *vectors, x, y vec) vec { return v.mul(x, y) }),
		binary("div", func(v *vectors, x, y vec) vec { return v.div(x, y) }),
		binary("minimum", func(v *vectors, x, y vec) vec {
			// -0 is what one of two zeros has set
			return v.orNaN(x, y, v.or(v.min(x, y), v.min(y, x)))
		}),
		binary("maximum", func(v *vectors, x, y vec) vec {
			return v.orNaN(x, y, v.and(v.max(x, y), v.max(y, x)))
		}),
		binary("less", comparison(less, false)),
		binary("lessEqual", comparison(lessEqual, false)),
		binary("greater", comparison(less, true)),
		binary("greaterEqual", comparison(lessEqual, true)),
		binary("equal", comparison(equal, false)),
		binary("notEqual", comparison(notEqual, false)),
		{name: "where", operands: []string{"c", "x", "y"}, body: func(v *vectors, x []vec) vec {
			return v.choose(v.compare(notEqual, x[0], v.number(0)), x[1], x[2])
		}},
	}
	erf := long("erf", (*vectors).erf)
	erf.only = 4
	return append(list, erf)
}

func unary(name string, body func(v *vectors, x vec) vec) function {
	return function{name: name, operands: []string{"x"}, body: func(v *vectors, x []vec) vec {
		return body(v, x[0])
	}}
}

func long(name string, body func(v *vectors, x vec) vec) function {
	f := unary(name, body)
	f.long = true
	return f
}

func binary(name string, body func(v *vectors, x, y vec) vec) function {
	return function{name: name, operands: []string{"x", "y"}, body: func(v *vectors, x []vec) vec {
		return body(v, x[0], x[1])
	}}
}

// comparison gives 1 or 0.
func comparison(predicate int, swap bool) func(v *vectors, x, y vec) vec {
	return func(v *vectors, x, y vec) vec {
		if swap {
			x, y = y, x
		}
		return v.choose(v.compare(predicate, x, y), v.number(1), v.set(v.number(0)))
	}
}

// sign is the sign bit.
func (v *vectors) sign() Mem { return v.number(math.Copysign(0, -1)) }

func (v *vectors) abs(x vec) vec {
	if v.double {
		return v.and(x, v.integer(math.MaxInt64))
	}
	return v.and(x, v.integer(math.MaxInt32))
}

// signed gives d, which has the sign of x or is 0, the sign of x.
func (v *vectors) signed(d, x vec) vec { return v.or(d, v.and(x, v.sign())) }

func (v *vectors) greater(x vec, y float64) mask { return v.compare(less, v.set(v.number(y)), x) }

// orNaN returns d, or NaN if x or y is.
func (v *vectors) orNaN(x, y, d vec) vec {
	return v.choose(v.compare(unordered, x, y), v.add(x, y), d)
}

// floats is what functions of one type need to know.
type floats struct {
	mantissa int     // bits
	bias     int     // of exponents
	integers float64 // added to a number, it leaves no room for a fraction
	// added to the bits of a positive integer, it makes a number of it: 2^mantissa
	power      float64
	ln2, tail  float64 // ln 2 in two parts: products of the first and an exponent are exact
	least      float64 // e^least is 0
	most       float64 // e^most is infinite
	flat       float64 // expm1 is -1, and tanh of half is 1, from here on
	normal     float64 // the least one
	sqrtHalf   uint64  // the bits of sqrt(1/2)
	exp, expm1 []float64
	log        []float64
}

// Origin: own, minimax polynomials; ln 2 in two parts is as in FreeBSD msun
func (v *vectors) floats() floats {
	if v.double {
		quotients := []float64{
			0.5, 0.16666666666666677, 0.0416666666666667, 0.008333333333321436,
			0.0013888888888866353, 0.00019841269886672016,
			2.48015873614736e-05, 2.75572436104689e-06, 2.7557242002972404e-07,
			2.5109261395621618e-08, 2.0924670237722007e-09,
		}
		return floats{
			52, 1023, 3 << 51, 1 << 52, 6.93147180369123816490e-01, 1.90821492927058770002e-10,
			-746, 710, 40, 0x1p-1022, math.Float64bits(math.Sqrt2 / 2), quotients, quotients,
			[]float64{
				0.6666666666666735, 0.399999999994113, 0.28571428743223065, 0.22222198479599417,
				0.18183569569516417, 0.1531390725096072, 0.14797470532639503,
			},
		}
	}
	return floats{
		23, 127, 3 << 22, 1 << 23, 0.693145751953125, 1.42860682030941723212e-6,
		-104, 89, 18, 0x1p-126, uint64(math.Float32bits(math.Sqrt2 / 2)),
		[]float64{0.5, 0.166665181517601, 0.04166620224714279, 0.008369024842977524,
			0.001395073952153325},
		[]float64{0.5, 0.1666666716337204, 0.04166635125875473, 0.00833327230066061,
			0.0013941206270828843, 0.00019914479344151914},
		[]float64{0.6666666269302368, 0.4000033736228943, 0.28537240624427795, 0.23583540320396423},
	}
}

// reduce returns r and k with x = k ln 2 + r, where k is the integer next to x/ln 2.
func (v *vectors) reduce(x vec) (r, k vec) {
	f := v.floats()
	k = v.sub(v.scaleAdd(x, v.number(math.Log2E), v.set(v.number(f.integers))),
		v.number(f.integers))
	r = v.scaleAdd(k, v.number(-f.ln2), x)
	return v.scaleAdd(k, v.number(-f.tail), r), k
}

// powerOf returns 2^k of an integer that is an exponent.
func (v *vectors) powerOf(k vec) vec {
	f := v.floats()
	return v.addBits(v.shiftLeft(v.add(k, v.number(f.integers)), f.mantissa),
		v.integer(uint64(f.bias)<<f.mantissa))
}

// clamped returns x between two numbers, or NaN.
func (v *vectors) clamped(x vec, least, most float64) vec {
	return v.max(v.set(v.number(least)), v.min(v.set(v.number(most)), x))
}

// exp is 2^k e^r, with |r| <= ln(2)/2. It multiplies by 2^k in two steps, since k is beyond the
// exponents where the result overflows, or has less digits.
func (v *vectors) exp(x vec) vec {
	f := v.floats()
	r, k := v.reduce(v.clamped(x, f.least, f.most))
	q := v.polynomial(r, f.exp...)
	p := v.add(v.mulAdd(v.mul(r, r), q, r), v.number(1))
	half := v.round(v.mul(k, v.number(0.5)), down)
	return v.mul(v.mul(p, v.powerOf(half)), v.powerOf(v.sub(k, half)))
}

// expm1 is 2^k (e^r - 1) + (2^k - 1), times 2 at the end, so that 2^k does not overflow before the
// result does.
func (v *vectors) expm1(x vec) vec {
	f := v.floats()
	r, k := v.reduce(v.clamped(x, -f.flat, f.most))
	p := v.mulAdd(v.mul(r, r), v.polynomial(r, f.expm1...), r)
	power := v.powerOf(v.sub(k, v.number(1)))
	d := v.mulAdd(power, p, v.sub(power, v.number(0.5)))
	return v.add(d, d)
}

// split returns m and k with x = m 2^k and sqrt(1/2) <= m < sqrt(2), for a positive number x.
func (v *vectors) split(x vec) (m, k vec) {
	f := v.floats()
	subnormal := v.compare(less, x, v.number(f.normal))
	scale := math.Ldexp(1, f.mantissa+2)
	x = v.choose(subnormal, v.mul(x, v.number(scale)), x)
	m, k = v.splitNormal(x)
	return m, v.choose(subnormal, v.sub(k, v.number(float64(f.mantissa+2))), k)
}

func (v *vectors) splitNormal(x vec) (m, k vec) {
	f := v.floats()
	bits := v.subBits(x, v.integer(f.sqrtHalf))
	biased := v.shiftRight(v.addBits(bits, v.integer(uint64(f.bias)<<f.mantissa)), f.mantissa)
	k = v.sub(v.or(biased, v.number(f.power)), v.number(f.power+float64(f.bias)))
	return v.addBits(v.and(bits, v.integer(1<<f.mantissa-1)), v.integer(f.sqrtHalf)), k
}

// parts are a logarithm: first - (second - third).
type parts struct{ first, second, third vec }

// logarithm is ln m, of m between sqrt(1/2) and sqrt(2), by the method of FreeBSD's msun: with f =
// m - 1, s = f/(2+f) and z = s^2, ln(1+f) = f - (f^2/2 - s (f^2/2 + z R(z))).
func (v *vectors) logarithm(m vec) parts {
	f := v.sub(m, v.number(1))
	s := v.div(f, v.add(f, v.number(2)))
	z := v.mul(s, s)
	r := v.mul(z, v.polynomial(z, v.floats().log...))
	square := v.mul(v.mul(f, f), v.number(0.5))
	return parts{f, square, v.mul(s, v.add(r, square))}
}

func (p parts) combined(v *vectors) vec { return v.sub(p.first, v.sub(p.second, p.third)) }

// addPowers adds k ln 2.
func (v *vectors) addPowers(p parts, k vec) vec {
	f := v.floats()
	p.third = v.scaleAdd(k, v.number(f.tail), p.third)
	return v.scaleAdd(k, v.number(f.ln2), p.combined(v))
}

// logarithmOf returns d, the logarithm of x, where x is positive and finite, and what it is
// elsewhere.
func (v *vectors) logarithmOf(x, d vec) vec {
	d = v.choose(v.compare(equal, x, v.number(math.Inf(1))), x, d)
	d = v.choose(v.compare(equal, x, v.number(0)), v.number(math.Inf(-1)), d)
	positive := v.compare(lessEqual, v.set(v.number(0)), x)
	return v.choose(positive, d, v.set(v.number(math.NaN())))
}

// log1p is ln u + c/u, where u = 1 + x is rounded, and c is what was lost.
func (v *vectors) log1p(x vec) vec {
	u := v.add(x, v.number(1))
	// What is lost of 1 + x, of which the greater one is subtracted first (Moler and Knuth's sum of
	// two).
	rest := v.sub(u, x)
	lost := v.add(v.sub(v.set(v.number(1)), rest), v.sub(x, v.sub(u, rest)))
	m, k := v.splitNormal(u)
	p := v.logarithm(m)
	p.third = v.add(p.third, v.div(lost, u))
	d := v.addPowers(p, k)
	return v.logarithmOf(u, d)
}

// tanh is e/(e+2), where e = e^2|x| - 1.
func (v *vectors) tanh(x vec) vec {
	a := v.abs(x)
	e := v.expm1(v.min(v.set(v.number(v.floats().flat)), v.add(a, a)))
	return v.signed(v.div(e, v.add(e, v.number(2))), x)
}

// sigmoid is 1/(1+e), or e/(1+e) for negative x, where e = e^-|x|.
func (v *vectors) sigmoid(x vec) vec {
	e := v.exp(v.or(x, v.sign()))
	above := v.choose(v.compare(less, x, v.number(0)), e, v.set(v.number(1)))
	return v.div(above, v.add(e, v.number(1)))
}

// softplus is max(x, 0) + log1p(e^-|x|).
func (v *vectors) softplus(x vec) vec {
	return v.add(v.log1p(v.exp(v.or(x, v.sign()))), v.max(x, v.number(0)))
}

// erfCoefficients has the coefficients of polynomials for erf(x)/x in t, with x = i/2 + 1/4 + t:
// line i is for x from i/2 to (i+1)/2. They are right to 2^-27.
//
// Origin: own, minimax polynomials
var erfCoefficients = [8][]float32{
	{1.105305552482605, -0.18116548657417297, -0.3353508412837982, 0.10469182580709457,
		0.08901327848434448, -0.03497049957513809, -0.017932690680027008},
	{0.9482074975967407, -0.40703511238098145, -0.10021759569644928, 0.16932423412799835,
		-0.02485588565468788, -0.037270646542310715, 0.014155179262161255},
	{0.7383201122283936, -0.4014393091201782, 0.08462999761104584, 0.06634178012609482,
		-0.05797644704580307, 0.008086060173809528, 0.009981654584407806},
	{0.5638123750686646, -0.29202139377593994, 0.11409442126750946, -0.013673193752765656,
		-0.019676418974995613, 0.01486197579652071, -0.003312858520075679},
	{0.4437943398952484, -0.19406753778457642, 0.07910996675491333, -0.025507820770144463,
		0.0028525192756205797, 0.003571763401851058, -0.0028161865193396807},
	{0.3635997772216797, -0.13200490176677704, 0.04741550236940384, -0.016239464282989502,
		0.0047206818126142025, -0.0006746597355231643, -0.00036162827746011317},
	{0.30769097805023193, -0.09466516971588135, 0.029098551720380783, -0.008893189020454884,
		0.0026483487166374922, -0.0007171218749135733, 0.00013604362902697176},
	{0.2666666507720947, -0.07111086696386337, 0.018962016329169273, -0.00505434675142169,
		0.0013441541232168674, -0.0003556563751772046, 8.927563612814993e-05},
}

// erf is x times a polynomial for |x| up to 4, from where it is 1.
func (v *vectors) erf(x vec) vec {
	f := v.floats()
	a := v.min(v.set(v.number(4)), v.abs(x))
	i := v.min(v.round(v.add(a, a), down), v.number(7))
	t := v.sub(v.scaleAdd(i, v.number(-0.5), a), v.number(0.25))
	i = v.add(i, v.number(f.integers)) // whose low bits are the line
	last := len(erfCoefficients[0]) - 1
	p := v.pick(erfCoefficients, last, i)
	for k := last - 1; k >= 0; k-- {
		p = v.mulAdd(p, t, v.pick(erfCoefficients, k, i))
	}
	return v.signed(v.min(v.set(v.number(1)), v.mul(a, p)), x)
}

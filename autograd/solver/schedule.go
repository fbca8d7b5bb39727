package solver

import "math"

// Schedule is a learning rate for each step of a training. Set it before each Step:
//
//	rate := solver.Warmup(100, solver.Cosine(0.003, 0, 2000)) // or solver.OneCycle(0.003, 2100)
//	...
//	adam.SetRate(rate(step))
//
// Steps count from 0, and continue from a checkpoint: keep the number of the next step in
// the progress of a checkpoint. All ranks compute the same rate.
type Schedule func(step int) float64

// Constant is the same rate in each step.
func Constant(rate float64) Schedule { return func(int) float64 { return rate } }

// Cosine falls from one rate, in step 0, to another, in step steps and after, along half a
// cosine: Loshchilov and Hutter, "SGDR: Stochastic Gradient Descent with Warm Restarts"
// (arXiv:1608.03983), without restarts.
func Cosine(from, to float64, steps int) Schedule {
	return func(step int) float64 {
		if step >= steps {
			return to
		}
		return halfCosine(from, to, math.Pi*float64(step)/float64(steps))
	}
}

// halfCosine is what lies between two rates, at an angle of 0 to π.
func halfCosine(from, to, angle float64) float64 {
	return to + (from-to)*(1+math.Cos(angle))/2
}

// OneCycle rises from 1/25 of a rate to that rate in the first 30 % of so many steps, falls to
// 1/250,000 of it in the others, along halves of a cosine, and stays there: Smith and Topin,
// "Super-Convergence" (arXiv:1708.07120), with the defaults of PyTorch's OneCycleLR, whose cycle of
// momenta is left out.
func OneCycle(rate float64, steps int) Schedule {
	first, last := rate/25, rate/25/1e4
	top, end := 0.3*float64(steps)-1, float64(steps-1)
	return func(step int) float64 {
		switch s := float64(step); {
		case s <= top:
			return halfCosine(first, rate, math.Pi*(s/top))
		case s < end:
			return halfCosine(rate, last, math.Pi*((s-top)/(end-top)))
		}
		return last
	}
}

// StepDecay multiplies the rate by factor once every given number of steps.
func StepDecay(rate, factor float64, every int) Schedule {
	return func(step int) float64 { return rate * math.Pow(factor, float64(step/max(every, 1))) }
}

// Warmup rises in equal increments to the first rate of another schedule, which it reaches in the
// last of its steps, and then follows that schedule from step 0.
func Warmup(steps int, then Schedule) Schedule {
	if then == nil {
		then = Constant(math.NaN()) // which solvers refuse
	}
	return func(step int) float64 {
		if step >= steps {
			return then(step - steps)
		}
		return then(0) * float64(step+1) / float64(steps)
	}
}

package conventions

import (
	"fmt"
	"math"
	"runtime"
	"slices"
	"strings"
)

// Runner is what computes a graph.
type Runner string

// The engines. Package vm computes the same on the host and on a GPU.
const (
	VM   Runner = "vm"
	Tape Runner = "tape machine"
)

// Rule is a convention of an engine that is not PyTorch's.
type Rule struct {
	Says    string // in the words of docs/ops.md
	ops     []string
	engines []Runner
	holds   func(c Case, d Difference) bool
}

// Rules are all such conventions. Every difference from PyTorch is one of them.
func Rules() []Rule {
	return slices.Concat(sharedRules(), composites(), kinks(), ownRules(), tapeRules(),
		assemblyRules())
}

var both = []Runner{VM, Tape}

// sharedRules are of operations that both engines compute alike.
func sharedRules() []Rule {
	isNaN := math.IsNaN
	return []Rule{
		{"NaN of NaN, where PyTorch has 0", []string{"Sign"}, both,
			func(_ Case, d Difference) bool { return isNaN(d.X[0]) && isNaN(d.Got) }},
		{"the gradient at NaN is NaN, in PyTorch 0", []string{"Abs", "nn.Norm"}, both,
			func(_ Case, d Difference) bool {
				return d.gradient() && isNaN(d.X[0]) && isNaN(d.Got)
			}},
		{"of equal numbers the first one has the gradient, in PyTorch each a half",
			[]string{"MaxBetween", "MinBetween"}, both,
			func(_ Case, d Difference) bool { return d.gradient() && d.X[0] == d.X[1] }},
		{"beside NaN the second one has the gradient, in PyTorch both",
			[]string{"MaxBetween", "MinBetween"}, []Runner{VM},
			func(_ Case, d Difference) bool {
				return d.Of == "dx0" && (isNaN(d.X[0]) || isNaN(d.X[1])) && d.Got == 0
			}},
		{"each of several largest elements has the gradient, in PyTorch a share",
			[]string{"Max"}, both,
			func(_ Case, d Difference) bool {
				return d.gradient() && math.Abs(d.Got) > math.Abs(d.Want) && d.Want != 0
			}},
		{"beside NaN the gradient is 0, in PyTorch NaN", []string{"Max"}, []Runner{VM},
			func(_ Case, d Difference) bool { return d.gradient() && isNaN(d.Want) && d.Got == 0 }},
	}
}

// composites are functions of Gorgonia that make several nodes, so that a graph does not say what
// is meant.
func composites() []Rule {
	isNaN := math.IsNaN
	return []Rule{
		{"the gradient at 0 is NaN, in PyTorch 0: use nn.Norm", []string{"Norm"}, both,
			func(_ Case, d Difference) bool { return d.gradient() && d.X[0] == 0 && isNaN(d.Got) }},
		{"NaN or infinite at 0 and 1, where PyTorch bounds logarithms by -100",
			[]string{"BinaryXent"}, both,
			func(_ Case, d Difference) bool {
				return (d.X[0] == 0 || d.X[0] == 1) && (isNaN(d.Got) || math.IsInf(d.Got, 0))
			}},
		{"the gradient is NaN if that of the result is infinite, in PyTorch infinite",
			[]string{"Mish"}, both, func(c Case, d Difference) bool {
				return d.gradient() && math.IsInf(c.DY[d.I], 0) && isNaN(d.Got)
			}},
		{"+Inf of -Inf to the constant 0.5, where PyTorch takes the root, NaN", []string{"Pow"},
			both, func(c Case, d Difference) bool {
				return c.Op == "Pow 0.5" && math.IsInf(d.X[0], -1) && isNaN(d.Want)
			}},
	}
}

// kinks are where a function has no derivative.
func kinks() []Rule {
	return []Rule{
		{"the gradient at 0 is dy, in PyTorch 0", []string{"Rectify", "MaxPool2D(Rectify)"}, both,
			func(_ Case, d Difference) bool { return d.gradient() && d.X[0] == 0 && d.Want == 0 }},
		{"the gradient at 0 is dy, in PyTorch alpha*dy", []string{"LeakyRelu"}, both,
			func(_ Case, d Difference) bool { return d.gradient() && d.X[0] == 0 }},
		{"the gradient at NaN is dy, in PyTorch alpha*dy", []string{"LeakyRelu"}, []Runner{VM},
			func(_ Case, d Difference) bool {
				return d.gradient() && math.IsNaN(d.X[0]) &&
					d.Got == 4*d.Want
			}},
	}
}

// ownRules are of operations of package nn.
func ownRules() []Rule {
	isNaN := math.IsNaN
	return []Rule{
		{"NaN where the variance overflows, in PyTorch NaN or 0", []string{"nn.LayerNorm"}, both,
			func(_ Case, d Difference) bool { return isNaN(d.Got) && d.Want == 0 }},
		{"NaN where the mean square overflows, in PyTorch NaN or 0", []string{"nn.RMSNorm"}, both,
			func(_ Case, d Difference) bool { return isNaN(d.Got) && d.Want == 0 }},
		{"NaN at the border beside filters that are not finite, where PyTorch leaves out what " +
			"lies outside", []string{"nn.Conv2D", "nn.ConvTranspose2D"}, both,
			func(_ Case, d Difference) bool { return isNaN(d.Got) && d.Of != "dx1" }},
		{"keys that are hidden change nothing, in PyTorch NaN if they are not finite",
			[]string{"nn.Attention"}, both,
			func(c Case, d Difference) bool {
				return c.Op == "nn.Attention causal" && isNaN(d.Want)
			}},
		{"the gradient of an ignored row is 0, in PyTorch NaN if a logit is not finite",
			[]string{"nn.CrossEntropy"}, both,
			func(c Case, d Difference) bool {
				return d.gradient() && c.Labels[d.I/c.Shapes[0][1]] == -100 && d.Got == 0
			}},
		{"0 if all labels are ignored, in PyTorch NaN", []string{"nn.CrossEntropy"}, both,
			func(_ Case, d Difference) bool { return d.Of == "y" && d.Got == 0 && isNaN(d.Want) }},
	}
}

// tapeRules are of Gorgonia's operations in its own machine.
func tapeRules() []Rule {
	isNaN := math.IsNaN
	tape := []Runner{Tape}
	return []Rule{
		{"an infinity is NaN where it is multiplied by 0: -Inf, and gradients",
			[]string{"Rectify"}, tape,
			func(_ Case, d Difference) bool { return isNaN(d.Got) }},
		{"the gradient at NaN is 0", []string{"Rectify", "LeakyRelu"}, tape,
			func(_ Case, d Difference) bool { return isNaN(d.X[0]) && d.Got == 0 }},
		{"infinities are NaN, and so are their gradients", []string{"LeakyRelu"}, tape,
			func(_ Case, d Difference) bool { return isNaN(d.Got) }},
		{"NaN is lost if it is the second one", []string{"MaxBetween", "MinBetween"}, tape,
			func(_ Case, d Difference) bool { return isNaN(d.X[1]) && !isNaN(d.Got) }},
		{"beside NaN the second one has the gradient", []string{"MaxBetween", "MinBetween"}, tape,
			func(_ Case, d Difference) bool {
				return d.gradient() &&
					(isNaN(d.X[0]) || isNaN(d.X[1]))
			}},
		{"NaN is lost, unless it is the first one", []string{"Max"}, tape,
			func(_ Case, d Difference) bool { return isNaN(d.Want) }},
		{"x/0 is +Inf for every x, also in gradients", []string{"HadamardDiv"}, tape,
			func(_ Case, d Difference) bool { return d.X[1] == 0 && math.IsInf(d.Got, 0) }},
		{"NaN or infinite gradients where base or exponent is 0", []string{"Pow"}, tape,
			func(c Case, d Difference) bool {
				exponent := append(d.X, 0)[1] // or "Pow 0"
				return d.gradient() && (d.Want == 0 || isNaN(d.Want)) &&
					(d.X[0] == 0 || exponent == 0)
			}},
		{"NaN of -Inf to the power 0.5 in float32", []string{"Pow"}, tape,
			func(c Case, d Difference) bool {
				return c.DType == "f32" && math.IsInf(d.X[0], -1) && isNaN(d.Got)
			}},
		{"0 times NaN or an infinity is 0", []string{"Mul"}, tape,
			func(_ Case, d Difference) bool { return isNaN(d.Want) && !isNaN(d.Got) }},
		{"NaN of a number below 0 and one beyond 2^63", []string{"Pow"}, tape,
			func(_ Case, d Difference) bool {
				return d.X[0] < 0 && math.Abs(d.X[1]) > 1e18 &&
					isNaN(d.Got)
			}},
		{"the largest numbers are wrong in float32", []string{"Sin", "Cos"}, tape,
			func(c Case, d Difference) bool { return c.DType == "f32" && math.Abs(d.X[0]) > 1e30 }},
	}
}

// assemblyRules are of Gorgonia's assembly, which it has for amd64 alone.
func assemblyRules() []Rule {
	if runtime.GOARCH != "amd64" {
		return nil
	}
	return []Rule{
		{"the derivative at the largest number is 0 in float32", []string{"Exp", "Expm1"},
			[]Runner{Tape},
			func(c Case, d Difference) bool {
				return c.DType == "f32" && d.gradient() && d.X[0] > 1e38
			}},
		{"numbers below the normal ones are wrong", []string{"Log"}, []Runner{Tape},
			func(_ Case, d Difference) bool { return math.Abs(d.X[0]) < 1.2e-38 }},
	}
}

// gradient reports whether the difference is in a gradient.
func (d Difference) gradient() bool { return strings.HasPrefix(d.Of, "dx") }

// name returns the operation without its parameters.
func (c Case) name() string {
	name, _, _ := strings.Cut(c.Op, " ")
	return name
}

// Explain returns the rules that the differences from PyTorch follow, and those that follow none.
func (c Case) Explain(e Runner, got Results) (follow []string, others []Difference) {
	rules := Rules()
	for _, d := range c.Differences(got) {
		i := slices.IndexFunc(rules, func(r Rule) bool {
			return slices.Contains(r.ops, c.name()) && slices.Contains(r.engines, e) &&
				!strings.HasSuffix(d.Of, "length") && r.holds(c, d)
		})
		if i < 0 {
			others = append(others, d)
		} else if !slices.Contains(follow, rules[i].Says) {
			follow = append(follow, rules[i].Says)
		}
	}
	return follow, others
}

// Unsafe reports whether the engine cannot run the case: Gorgonia's tape machine ends the program
// where the backward pass of a pool finds no largest element.
func (c Case) Unsafe(e Runner) bool { return e == Tape && strings.HasPrefix(c.Op, "MaxPool2D") }

// Line is what an engine does with an operation.
type Line struct {
	Op   string
	Says map[Runner][]string // in the order of Rules; nothing if the engine does as PyTorch
}

// Lines computes all cases on the engines. It fails if one differs from PyTorch by no rule.
func Lines(machines map[Runner]Maker) ([]Line, error) {
	cases, _, err := Cases()
	if err != nil {
		return nil, err
	}
	var lines []Line
	for _, c := range cases {
		at := slices.IndexFunc(lines, func(l Line) bool { return l.Op == c.name() })
		if at < 0 {
			at = len(lines)
			lines = append(lines, Line{c.name(), map[Runner][]string{}})
		}
		for e, machine := range machines {
			if c.Unsafe(e) {
				continue
			}
			all, err := c.Compute(1, machine)
			if err != nil {
				return nil, err
			}
			follow, others := c.Explain(e, all[0])
			if len(others) > 0 {
				return nil, fmt.Errorf("conventions: %s of %s in %s: %+v is no known convention",
					c.Op, c.DType, e, others[0])
			}
			for _, says := range follow {
				if !slices.Contains(lines[at].Says[e], says) {
					lines[at].Says[e] = append(lines[at].Says[e], says)
				}
			}
		}
	}
	return lines, nil
}

package conventions

import (
	"fmt"
	"math"
	"strconv"

	"gorgonia.org/gorgonia"
	"gorgonia.org/tensor"

	"github.com/euryale-ml/euryale/ops/nn"
)

// function builds an operation of a case: parameters are what follows its name.
type function func(c Case, x gorgonia.Nodes, parameters string) (*gorgonia.Node, error)

// ofNodes are further operations by name. Those that have options get their zero value, unless
// parameters say more.
func ofNodes() map[string]function {
	all := map[string]function{
		"nn.AvgPool2D":        averagePool,
		"nn.CrossEntropyWith": crossEntropy,
		"nn.Attention":        attention,
		"Norm": func(_ Case, x gorgonia.Nodes, p string) (*gorgonia.Node, error) {
			n, err := strconv.Atoi(p)
			if err != nil {
				return nil, err
			}
			return gorgonia.Norm(x[0], 1, n)
		},
		"nn.TopK": func(_ Case, x gorgonia.Nodes, k string) (*gorgonia.Node, error) {
			n, err := strconv.Atoi(k)
			if err != nil {
				return nil, err
			}
			values, _, err := nn.TopK(1, n, x[0])
			return values, err
		},
		"Pow": power,
	}
	for name, f := range simple() {
		all[name] = func(_ Case, x gorgonia.Nodes, _ string) (*gorgonia.Node, error) { return f(x) }
	}
	for name, f := range byIntegers() {
		all[name] = func(c Case, x gorgonia.Nodes, _ string) (*gorgonia.Node, error) {
			return f(x, c.integers(x[0].Graph()))
		}
	}
	return all
}

// byIntegers are operations with integers, by name.
func byIntegers() map[string]func(x gorgonia.Nodes, i *gorgonia.Node) (*gorgonia.Node, error) {
	return map[string]func(x gorgonia.Nodes, i *gorgonia.Node) (*gorgonia.Node, error){
		"nn.Where": func(x gorgonia.Nodes, i *gorgonia.Node) (*gorgonia.Node, error) {
			return nn.Where(i, x[0], x[1])
		},
		"nn.MaskedFill": func(x gorgonia.Nodes, i *gorgonia.Node) (*gorgonia.Node, error) {
			return nn.MaskedFill(x[0], i, math.Inf(-1))
		},
		"nn.ByIndices": func(x gorgonia.Nodes, i *gorgonia.Node) (*gorgonia.Node, error) {
			return nn.ByIndices(0, x[0], i)
		},
		"nn.Embedding": func(x gorgonia.Nodes, i *gorgonia.Node) (*gorgonia.Node, error) {
			return nn.Embedding(x[0], i)
		},
		"nn.ScatterAdd": func(x gorgonia.Nodes, i *gorgonia.Node) (*gorgonia.Node, error) {
			return nn.ScatterAdd(0, 4, x[0], i)
		},
		"nn.IndexCopy": func(x gorgonia.Nodes, i *gorgonia.Node) (*gorgonia.Node, error) {
			return nn.IndexCopy(0, x[0], i, x[1])
		},
		"nn.GatherElements": func(x gorgonia.Nodes, i *gorgonia.Node) (*gorgonia.Node, error) {
			return nn.GatherElements(0, x[0], i)
		},
	}
}

// simple are operations of operands alone, by name.
func simple() map[string]func(x gorgonia.Nodes) (*gorgonia.Node, error) {
	all := map[string]func(x gorgonia.Nodes) (*gorgonia.Node, error){
		"nn.CumSum": func(x gorgonia.Nodes) (*gorgonia.Node, error) {
			return nn.CumSum(1, nn.CumSumOptions{}, x[0])
		},
		"nn.ArgMax": func(x gorgonia.Nodes) (*gorgonia.Node, error) {
			return nn.ArgMax(1, false, x[0])
		},
		"nn.ArgMin": func(x gorgonia.Nodes) (*gorgonia.Node, error) {
			return nn.ArgMin(1, false, x[0])
		},
		"nn.RMSNorm": func(x gorgonia.Nodes) (*gorgonia.Node, error) {
			return nn.RMSNorm(1e-5, x[0], x[1])
		},
		"BatchNorm": func(x gorgonia.Nodes) (*gorgonia.Node, error) {
			y, _, _, _, err := gorgonia.BatchNorm(x[0], x[1], x[2], 0.1, 1e-5)
			return y, err
		},
		"GroupNorm": func(x gorgonia.Nodes) (*gorgonia.Node, error) {
			return gorgonia.GroupNorm(x[0], x[1], x[2], 2, x[0].Shape()[1], 1e-5)
		},
		"BinaryXent": func(x gorgonia.Nodes) (*gorgonia.Node, error) {
			return gorgonia.BinaryXent(x[0], x[1])
		},
		"nn.BatchedMatMul": func(x gorgonia.Nodes) (*gorgonia.Node, error) {
			return nn.BatchedMatMul(false, false, x[0], x[1])
		},
		"nn.Rotary": func(x gorgonia.Nodes) (*gorgonia.Node, error) {
			return nn.Rotary(nn.RotaryOptions{}, x[0], x[1], x[2])
		},
		"nn.LSTM": func(x gorgonia.Nodes) (*gorgonia.Node, error) {
			y, _, _, err := nn.LSTM(nn.RecurrentOptions{}, x[0], x[1], x[2], x[3], x[4], x[5], x[6])
			return y, err
		},
		"nn.GRU": func(x gorgonia.Nodes) (*gorgonia.Node, error) {
			y, _, err := nn.GRU(nn.RecurrentOptions{}, x[0], x[1], x[2], x[3], x[4], x[5])
			return y, err
		},
		"nn.MaxPool2D": func(x gorgonia.Nodes) (*gorgonia.Node, error) {
			return nn.MaxPool2D([2]int{2, 2}, [2]int{}, [2]int{2, 2}, x[0], nn.PoolOptions{})
		},
	}
	for name, f := range map[string]func(axes []int, keepDims bool, x *gorgonia.Node) (
		*gorgonia.Node, error){"nn.ReduceMax": nn.ReduceMax, "nn.ReduceMin": nn.ReduceMin,
		"nn.ReduceProd": nn.ReduceProd, "nn.LogSumExp": nn.LogSumExp} {
		all[name] = func(x gorgonia.Nodes) (*gorgonia.Node, error) {
			return f([]int{1}, false, x[0])
		}
	}
	for name, f := range map[string]func(o nn.ConvOptions, x, w, bias *gorgonia.Node) (
		*gorgonia.Node, error){"nn.Conv1D": nn.Conv1D, "nn.Conv2D": nn.Conv2D,
		"nn.Conv3D": nn.Conv3D, "nn.ConvTranspose2D": nn.ConvTranspose2D} {
		all[name] = func(x gorgonia.Nodes) (*gorgonia.Node, error) {
			if x = append(x, nil); len(x) > 3 {
				x = x[:3]
			}
			return f(nn.ConvOptions{}, x[0], x[1], x[2])
		}
	}
	return all
}

// attention has the zero value of its options.
func attention(_ Case, x gorgonia.Nodes, parameters string) (*gorgonia.Node, error) {
	return nn.Attention(x[0], x[1], x[2], nn.AttentionOptions{Causal: parameters != ""})
}

// power is of two operands, or to a constant.
func power(c Case, x gorgonia.Nodes, constant string) (*gorgonia.Node, error) {
	if constant == "" {
		return gorgonia.Pow(x[0], x[1])
	}
	e, err := strconv.ParseFloat(constant, 64)
	if err != nil {
		return nil, err
	}
	if c.DType == "f32" {
		return gorgonia.Pow(x[0], gorgonia.NewConstant(float32(e)))
	}
	return gorgonia.Pow(x[0], gorgonia.NewConstant(e))
}

// averagePool has the zero value of its options.
func averagePool(_ Case, x gorgonia.Nodes, padded string) (*gorgonia.Node, error) {
	var pad [2]int
	if padded != "" {
		pad = [2]int{1, 1}
	}
	return nn.AvgPool2D([2]int{2, 2}, pad, [2]int{2, 2}, x[0], nn.PoolOptions{})
}

// crossEntropy has the zero value of its options, or one that is set.
func crossEntropy(c Case, x gorgonia.Nodes, option string) (*gorgonia.Node, error) {
	var o nn.CrossEntropyOptions
	switch option {
	case "":
	case "smoothing":
		o.Smoothing = 0.25
	case "sum":
		o.Reduction = nn.SumOfRows
	case "weights":
		o.Weights = c.variable(x[0].Graph(), "weights", tensor.Shape{3}, Numbers{2, 0, 1})
	default:
		return nil, fmt.Errorf("conventions: nn.CrossEntropyWith: no option %q", option)
	}
	return nn.CrossEntropyWith(o, x[0], c.integers(x[0].Graph()))
}

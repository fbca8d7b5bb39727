package autograd

import (
	"fmt"
	"maps"
	"slices"
	"strconv"
	"strings"

	"github.com/euryale-ml/euryale/autograd/internal/checkpoint"
	"github.com/euryale-ml/euryale/backend"
	"github.com/euryale-ml/euryale/internal/stock"
)

// namedTensor is a tensor with a name in a file: that of its node in the graph, so that other
// programs find it and the order of parameters does not matter:
//
//	block0.attention.qkv.weight                  a parameter, or a variable of WithFrozen
//	bn.running_mean, bn.running_var              the running statistics of the batch norm that
//	                                             the variable bn scales ([stock.Averages])
//	solver.adam.m/block0.attention.qkv.weight    what the solver keeps for a parameter
//	solver.group.1.adam.m/ln_f.bias              what group 1 of Groups keeps for one
//	solver.adam.steps                            what it keeps besides
//
// In memory each has a key with the parameter's number in this program (param.key, piece.key, the
// names of Stateful). Files of format 1 have these keys.
type namedTensor struct {
	key, file string
	what      string // in messages
	shape     []int
	dtype     backend.DType
	of        *param // whose elements it has, or what belongs to them one by one; nil for none
	constant  bool   // nothing trains it
}

// checkNames returns an error unless all names are valid and unique.
func checkNames(all []namedTensor) error {
	const rename = "give each variable a unique name (gorgonia.WithName): the tensors of a " +
		"file have them"
	by := map[string]string{}
	for _, n := range all {
		err := checkpoint.CheckName(n.file)
		other, twice := by[n.file]
		switch {
		case err != nil:
		case twice:
			err = fmt.Errorf("%w: its name is also the name of %s", backend.ErrArgument, other)
		case strings.HasPrefix(n.file, checkpoint.SolverPrefix):
			err = fmt.Errorf("%w: its name begins with %q, as only a solver's state does",
				backend.ErrArgument, checkpoint.SolverPrefix)
		}
		if err != nil {
			return fmt.Errorf("%s: %w: %s", n.what, err, rename)
		}
		by[n.file] = n.what
	}
	return nil
}

// tensors returns the names of all tensors of the model.
func (v *inventory) tensors() (all []namedTensor) {
	for _, p := range v.learnables {
		what := fmt.Sprintf("parameter %d", p.index)
		if p.node.Name() != stock.Unnamed {
			what += fmt.Sprintf(", %q", p.name)
		}
		all = append(all, namedTensor{p.key(), p.node.Name(), what, p.dims(), p.dtype, p, false})
	}
	for _, p := range v.pieces() {
		what := p.name
		if p.file != stock.Unnamed {
			what += fmt.Sprintf(", %q", p.file)
		}
		all = append(all, namedTensor{p.key, p.file, what, p.shape, p.dtype, nil, p.node != nil})
	}
	return all
}

// rename gives running statistics of an older version, which had the numbers of batch norms in
// their graph, the names that they have in this program, as far as their shapes say which are
// which. It returns an error, and renames none, if a number may belong to several.
func (v *inventory) rename(all map[string]stored, nameOf func(p piece) string) error {
	kindOf := func(suffix string, shape []int) string { return suffix + fmt.Sprint(shape) }
	old, here := map[string][]string{}, map[string][]string{}
	for name, t := range all {
		if suffix := numberedAverage(name); suffix != "" {
			old[kindOf(suffix, t.Shape)] = append(old[kindOf(suffix, t.Shape)], name)
		}
	}
	for _, p := range v.averages {
		if _, there := all[nameOf(p)]; !there {
			kind := kindOf(p.file[strings.LastIndex(p.file, "."):], p.shape)
			here[kind] = append(here[kind], nameOf(p))
		}
	}
	for _, kind := range slices.Sorted(maps.Keys(here)) {
		if n := len(old[kind]); n > 1 || n == 1 && len(here[kind]) > 1 {
			return fmt.Errorf("%w: an older version has numbered the running statistics of batch "+
				"norms by their places in a graph, and which are which is unknown (%s, and here "+
				"%s): load the other tensors alone by LoadWeights with NonStrict, and give "+
				"ReadWeights' to SetStats of the operations", backend.ErrArgument,
				nameList(old[kind]), nameList(here[kind]))
		}
	}
	for kind, names := range here {
		if len(old[kind]) == 1 {
			all[names[0]] = all[old[kind][0]]
			delete(all, old[kind][0])
		}
	}
	return nil
}

// numberedAverage returns the suffix of a name that running statistics have in files of older
// versions and of format 1, "" for other names, such as those with a hash of 16 digits.
func numberedAverage(name string) (suffix string) {
	parts := strings.Split(name, ".")
	if len(parts) != 3 || len(parts[1]) > 6 {
		return ""
	}
	if _, err := strconv.ParseUint(parts[1], 10, 32); err != nil {
		return ""
	}
	switch parts[0] + "." + parts[2] {
	case "batchnorm.running_mean", averagePrefix + "mean":
		return meanSuffix
	case "batchnorm.running_var", averagePrefix + "variance":
		return varianceSuffix
	}
	return ""
}

// nameList writes names for a message, the first few of many.
func nameList(names []string) string {
	const most = 8
	if len(names) > most {
		return fmt.Sprintf("%s and %d more", strings.Join(names[:most], ", "), len(names)-most)
	}
	return strings.Join(names, ", ")
}

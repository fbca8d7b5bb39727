package solver

import (
	"errors"
	"fmt"
	"maps"
	"slices"
	"strconv"
	"strings"

	"gorgonia.org/gorgonia"

	"github.com/euryale-ml/euryale/backend"
	"github.com/euryale-ml/euryale/internal/stock"
)

// Group is some of a model's parameters, and the solver that updates them.
type Group struct {
	Solver Solver
	Params gorgonia.Nodes
}

// Groups is a solver that updates groups of parameters by different solvers, or with different
// settings, like the parameter groups of torch.optim. For example, biases without weight decay:
//
//	groups, err := solver.NewGroups(learnables,
//		solver.Group{Solver: &solver.AdamW{Rate: 1e-3, WeightDecay: 0.1}, Params: weights},
//		solver.Group{Solver: &solver.AdamW{Rate: 1e-3}, Params: biases})
//	...
//	grads, err := dp.Sync()
//	err = groups.Step(grads)
//	err = dp.Save(dir, groups, progress)
//
// Each solver has its own rate: call its SetRate, or SetRate of Groups, which sets one rate for
// all. A checkpoint has the states of all groups, and only a program with the same groups can load
// it.
type Groups struct {
	all    gorgonia.Nodes
	groups []ruled
	params [][]int  // of each group, numbers in the order of New
	of     []member // of each parameter
}

var _ Solver = (*Groups)(nil)

// NewGroups returns a solver of groups. params are all parameters, in the order of the gradients
// passed to Step.
//
// Errors: ErrArgument, with names, for a parameter in no group, in two groups, or twice in one, for
// one that is not among params, for a group without parameters, and for a solver used in two
// groups, whose steps would count twice; ErrUnsupported for solvers of other packages, and for
// groups of groups.
func NewGroups(params gorgonia.Nodes, groups ...Group) (*Groups, error) {
	if err := backend.Given("solver.NewGroups", "params", params); err != nil {
		return nil, err
	}
	for k, group := range groups {
		if err := backend.Given("solver.NewGroups", "Solver", group.Solver, "Params",
			group.Params); err != nil {
			return nil, wrapped("group %d: %w", k, err)
		}
	}
	g := &Groups{all: slices.Clone(params), of: make([]member, len(params))}
	for i := range g.of {
		g.of[i] = member{part: -1}
		if slices.Index(params, params[i]) != i {
			return nil, refuseGroups("%s is twice among the parameters", stock.Label(params[i]))
		}
	}
	for k, group := range groups {
		if err := g.add(params, group); err != nil {
			return nil, wrapped("group %d: %w", k, err)
		}
	}
	for i, at := range g.of {
		if at.part < 0 {
			return nil, refuseGroups("parameter %d, %s, is in no group", i, stock.Label(params[i]))
		}
	}
	return g, nil
}

// add adds a group.
func (g *Groups) add(params gorgonia.Nodes, group Group) error {
	s, ok := group.Solver.(ruled)
	switch {
	case !ok:
		return fmt.Errorf("solver: Groups: %w: a %T is not a single solver of package "+
			"solver", backend.ErrUnsupported, group.Solver)
	case slices.ContainsFunc(g.groups, func(other ruled) bool { return other == s }):
		return refuseGroups("its solver has another group, too: make a solver for each")
	case len(group.Params) == 0:
		return refuseGroups("it has no parameters")
	}
	k, numbers := len(g.groups), []int{}
	for _, n := range group.Params {
		i := slices.Index(params, n)
		switch {
		case i < 0:
			return refuseGroups("%s is not among the parameters", stock.Label(n))
		case g.of[i].part == k:
			return refuseGroups("%s is in it twice", stock.Label(n))
		case g.of[i].part >= 0:
			return refuseGroups("%s is in group %d, too", stock.Label(n), g.of[i].part)
		}
		g.of[i].part = k
		numbers = append(numbers, i)
	}
	slices.Sort(numbers)
	for at, i := range numbers {
		g.of[i].param = at
	}
	g.groups, g.params = append(g.groups, s), append(g.params, numbers)
	return nil
}

// Params returns all parameters, in the order of NewGroups.
func (g *Groups) Params() gorgonia.Nodes { return slices.Clone(g.all) }

// List returns the groups, each with its parameters in the order of NewGroups.
func (g *Groups) List() []Group {
	all := make([]Group, len(g.groups))
	for k, s := range g.groups {
		all[k].Solver = s
		for _, i := range g.params[k] {
			all[k].Params = append(all[k].Params, g.all[i])
		}
	}
	return all
}

func refuseGroups(format string, args ...any) error {
	return fmt.Errorf("solver: Groups: %w: %w", backend.ErrArgument, fmt.Errorf(format, args...))
}

// Step updates the parameters, given in the order of NewGroups, in place. It returns the errors of
// [Solver]; if one group refuses its parameters, nothing has changed.
func (g *Groups) Step(params []gorgonia.ValueGrad) error {
	if len(params) != len(g.of) {
		return refuseGroups("Step is given %d parameters, the groups have %d", len(params),
			len(g.of))
	}
	for _, s := range g.groups {
		if err := s.check(); err != nil {
			return err
		}
	}
	all, err := operandsOfAll("Groups", params)
	if err != nil {
		return err
	}
	own, states := make([][]operands, len(g.groups)), make([]*solverState, len(g.groups))
	for k, s := range g.groups {
		for _, i := range g.params[k] {
			own[k] = append(own[k], all[i])
		}
		states[k] = s.memory()
		if err := states[k].prepare(s.rule(), own[k]); err != nil {
			return wrapped("group %d: %w", k, err)
		}
	}
	for k, s := range g.groups {
		if err := states[k].update(s.rule(), own[k]); err != nil {
			return wrapped("group %d: %w", k, err)
		}
	}
	return nil
}

// SetRate implements [Solver]: it sets one rate for all groups.
func (g *Groups) SetRate(rate float64) {
	for _, s := range g.groups {
		s.SetRate(rate)
	}
}

// prefixOf begins the names of a group's state.
func prefixOf(group int) string { return fmt.Sprintf("group.%d.", group) }

// State implements [Stateful].
func (g *Groups) State() (map[string]backend.Buffer, error) {
	all := map[string]backend.Buffer{}
	for k, s := range g.groups {
		state, err := s.State()
		if err != nil {
			return nil, wrapped("group %d: %w", k, err)
		}
		for name, b := range state {
			all[prefixOf(k)+name] = b
		}
	}
	return all, nil
}

// SetState implements [Stateful].
func (g *Groups) SetState(state map[string]backend.Buffer) error {
	if err := g.check(state, nil); err != nil {
		return err
	}
	for k, s := range g.groups {
		if err := s.SetState(within(state, k)); err != nil {
			return wrapped("group %d: %w", k, err)
		}
	}
	return nil
}

// CheckState implements [Checker]. It refuses a state of other groups.
func (g *Groups) CheckState(state map[string]backend.Buffer, params []backend.Buffer) error {
	if len(params) != len(g.of) {
		return refuseGroups("a state for %d parameters, the groups have %d", len(params), len(g.of))
	}
	return g.check(state, params)
}

// check returns an error for a state that no group, or not all of them, would take.
func (g *Groups) check(state map[string]backend.Buffer, params []backend.Buffer) error {
	for _, name := range slices.Sorted(maps.Keys(state)) {
		_, vector := g.owner(name)
		k, rest, ok := groupOf(name)
		if ok && !vector && (k >= len(g.groups) || rest != g.groups[k].rule().counter &&
			rest != g.groups[k].rule().constant) {
			return refuseGroups("the state has %s, which is of none of these groups: pass the "+
				"groups that it was saved with", name)
		}
	}
	for k, s := range g.groups {
		own := within(state, k)
		_, stored, err := s.rule().parse(own)
		if err == nil && len(stored) > 0 && len(stored) != len(g.params[k]) {
			err = refuseGroups("its state is of %d parameters, and it has %d", len(stored),
				len(g.params[k]))
		}
		if err == nil && params != nil {
			var of []backend.Buffer
			for _, i := range g.params[k] {
				of = append(of, params[i])
			}
			err = s.CheckState(own, of)
		}
		_, counted := own[s.rule().counter] // 0 before the first step
		if err == nil && !counted && len(own) > 0 && s.rule().counter != "" {
			err = refuseGroups("its state has no number of steps")
		}
		if err != nil {
			return wrapped("group %d: %w", k, err)
		}
	}
	return nil
}

// within returns a group's part of a state.
func within(state map[string]backend.Buffer, group int) map[string]backend.Buffer {
	own := map[string]backend.Buffer{}
	for name, b := range state {
		if k, rest, ok := groupOf(name); ok && k == group {
			own[rest] = b
		}
	}
	return own
}

// groupOf returns the group whose state a name is of, and its name there.
func groupOf(name string) (group int, rest string, ok bool) {
	name, ok = strings.CutPrefix(name, "group.")
	number, rest, dot := strings.Cut(name, ".")
	group, err := strconv.Atoi(number)
	return group, rest, ok && dot && err == nil && group >= 0
}

// owner returns the number of the parameter that a vector of the state is of.
func (g *Groups) owner(name string) (param int, ok bool) {
	k, rest, ok := groupOf(name)
	if !ok || k >= len(g.groups) {
		return 0, false
	}
	i, ok := g.groups[k].rule().owner(rest)
	if !ok || i >= len(g.params[k]) {
		return 0, false
	}
	return g.params[k][i], true
}

// Close implements [Solver]: it closes the solvers of all groups.
func (g *Groups) Close() error {
	var all error
	for _, s := range g.groups {
		all = errors.Join(all, s.Close())
	}
	return all
}

// String names the solvers and the numbers of their parameters.
func (g *Groups) String() string {
	var all []string
	for k, s := range g.groups {
		all = append(all, fmt.Sprintf("%s of parameters %s", Kind(s), ranges(g.params[k])))
	}
	return "groups: " + strings.Join(all, ", ")
}

// ranges writes numbers in ascending order, such as "0-3 5".
func ranges(numbers []int) string {
	var all []string
	for at := 0; at < len(numbers); {
		end := at
		for end+1 < len(numbers) && numbers[end+1] == numbers[end]+1 {
			end++
		}
		text := fmt.Sprint(numbers[at])
		if end > at {
			text += fmt.Sprintf("-%d", numbers[end])
		}
		all, at = append(all, text), end+1
	}
	return strings.Join(all, " ")
}

// Kind names a solver by its type, a [Custom] also by its name, and an [EMA] and [Groups] also by
// their solvers: solvers of other kinds have other states.
func Kind(solver gorgonia.Solver) string {
	g, ok := solver.(*Groups)
	switch s := solver.(type) {
	case *Custom:
		return fmt.Sprintf("%T %s", s, s.Name)
	case *EMA:
		return fmt.Sprintf("%T of %s", s, Kind(s.Solver))
	}
	if !ok {
		return fmt.Sprintf("%T", solver)
	}
	var all []string
	for k, s := range g.groups {
		all = append(all, fmt.Sprintf("%s of %d parameters", Kind(s), len(g.params[k])))
	}
	return "groups: " + strings.Join(all, ", ")
}

// VectorNames returns the names that a solver's State gives to the vectors kept for a parameter, a
// number in the order of Step, with whatever settings. ok is false for solvers of other packages.
func VectorNames(solver gorgonia.Solver, param int) (names []string, ok bool) {
	prefix := ""
	if g, is := solver.(*Groups); is {
		if param >= len(g.of) {
			return nil, true
		}
		at := g.of[param]
		solver, prefix, param = g.groups[at.part], prefixOf(at.part), at.param
	}
	s, ok := solver.(ruled)
	if !ok {
		return nil, false
	}
	r := s.rule()
	for _, vector := range slices.Concat(r.keep, r.without) {
		names = append(names, fmt.Sprint(prefix, vector, param))
	}
	return names, true
}

// Package contracts has the variables that launchers set, as their documents give them, for tests.
package contracts

import (
	_ "embed"
	"fmt"
	"os"
	"strings"
)

//go:embed contracts.txt
var text string

// Case is what a launcher sets.
type Case struct {
	Name string
	// Machines says that the launcher starts a command on each machine, Refused that its variables
	// are not enough to join.
	Machines, Refused bool

	lines []string
}

// All returns the cases.
func All() (all []Case) {
	for block := range strings.SplitSeq(text, "\n\n") {
		head, lines, _ := strings.Cut(strings.TrimSpace(block), "\n")
		name, kind, found := strings.Cut(head, ": ")
		if !found || strings.HasPrefix(head, "#") {
			continue
		}
		kind, by, _ := strings.Cut(kind, " by ")
		c := Case{name, kind == "machines", kind == "refused", strings.Split(lines, "\n")}
		if by != "" {
			c.lines = append(c.lines, by+"=$first", "MASTER_PORT=29515")
		}
		all = append(all, c)
	}
	return all
}

// Of returns the variables of a process of a job, NAME=VALUE, on machines that are called node-0,
// node-1 and so on. Of a launcher of Machines, each machine has one process.
func (c Case) Of(machine, machines, local, locals int) (vars []string) {
	var hosts []string
	for m := range machines {
		hosts = append(hosts, fmt.Sprint("node-", m))
	}
	quoted := func(hosts []string) string {
		if len(hosts) == 0 {
			return ""
		}
		return `"` + strings.Join(hosts, `","`) + `"`
	}
	task := fmt.Sprintf(`"task":{"type":"workerpool1","index":%d}`, machine-1)
	main := hosts[0]
	if machine == 0 {
		task, main = `"task":{"type":"workerpool0","index":0}`, ""
	}
	of := map[string]string{
		"rank": fmt.Sprint(machine*locals + local), "size": fmt.Sprint(machines * locals),
		"local": fmt.Sprint(local), "locals": fmt.Sprint(locals),
		"machine": fmt.Sprint(machine), "machines": fmt.Sprint(machines),
		"first": hosts[0], "here": hosts[machine], "hosts": strings.Join(hosts, ","),
		"lines": strings.Join(hosts, "\n"), "quoted": quoted(hosts), "others": quoted(hosts[1:]),
		"task": task, "main": main,
	}
	for _, line := range c.lines {
		vars = append(vars, os.Expand(line, func(name string) string { return of[name] }))
	}
	return vars
}

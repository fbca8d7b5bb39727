package launchers

import (
	"encoding/json"
	"fmt"
	"net"
	"strings"

	"github.com/euryale-ml/euryale/internal/env"
)

// Vars reads the variables of a contract, up to the first error.
type Vars struct {
	get  Lookup
	used map[string]bool // those that are set
	err  error
}

// Text returns the first of the variables that is set, "" if none is.
func (v *Vars) Text(names ...string) string {
	for _, name := range names {
		if text := v.get(name); text != "" {
			v.used[name] = true
			return text
		}
	}
	return ""
}

// Count returns the number in the first of the variables that is set, [Unknown] if none is.
func (v *Vars) Count(names ...env.Count) int {
	for _, name := range names {
		if text := v.Text(string(name)); text != "" {
			return v.count(string(name), text)
		}
	}
	return Unknown
}

// count reads a number from the text of a variable, or of a part of it.
func (v *Vars) count(name, text string) int {
	n, err := env.Count(name).Read(func(string) string { return text }, 0)
	v.fail(err)
	return n
}

// join returns the values of those of the variables that are set.
func (v *Vars) join(names ...string) string {
	var all []string
	for _, name := range names {
		if text := v.Text(name); text != "" {
			all = append(all, text)
		}
	}
	return strings.Join(all, "-")
}

// JSON reads the value of a variable, and reports whether it is set.
func (v *Vars) JSON(name string, to any) bool {
	text := v.Text(name)
	if text == "" {
		return false
	}
	if err := json.Unmarshal([]byte(text), to); err != nil {
		v.fail(fmt.Errorf("%s=%.60s: %w", name, text, err))
	}
	return true
}

// meet sets where rank 0 is to the first of a list of HOST or HOST:PORT.
func (v *Vars) meet(p *Position, list []string) {
	if len(list) == 0 {
		return
	}
	host, port, err := net.SplitHostPort(list[0])
	if err != nil {
		p.Addr = list[0]
		return
	}
	p.Addr, p.Port = host, v.count("the port of "+list[0], port)
}

func (v *Vars) fail(err error) {
	if v.err == nil {
		v.err = err
	}
}

// PortOf computes a port from a number that differs between jobs. It is above the range of
// ephemeral ports.
func PortOf(number int) int {
	const first, count = 61440, 4096
	return first + number%count
}

// Loopback reports whether an address can only mean this machine; an empty one does.
func Loopback(addr string) bool {
	ip := net.ParseIP(addr)
	return addr == "" || addr == "localhost" || ip != nil && ip.IsLoopback()
}

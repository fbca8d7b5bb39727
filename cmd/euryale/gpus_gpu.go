//go:build gpu

package main

import (
	"errors"
	"fmt"
	"os"
	"strings"

	"github.com/euryale-ml/euryale/backend"
	"github.com/euryale-ml/euryale/internal/cuda"
	"github.com/euryale-ml/euryale/internal/env"
	"github.com/euryale-ml/euryale/internal/gpu/nvml"
	gpukernels "github.com/euryale-ml/euryale/internal/kernels/cuda"
)

// openGPUs opens all GPUs that this process can see.
func openGPUs() (*gpus, error) {
	n, newest, err := cuda.Driver()
	if err != nil {
		return nil, fmt.Errorf("%w; %s", err, kernelDriver())
	}
	g := &gpus{probe: 64 << 20}
	g.driver = fmt.Sprintf("for CUDA %d.%d; the oldest that works is 450.36, for CUDA 11.0",
		newest/1000, newest%1000/10)
	library, version, err := management()
	if err == nil {
		g.driver = version + ", " + g.driver
	} else {
		g.driver += "; " + kernelDriver()
		g.problems = append(g.problems, finding{about: "nvml", err: err})
	}
	devices, problems := openAll(n)
	g.problems = append(g.problems, problems...)
	names := map[string]string{}
	for _, d := range devices {
		names[strings.ToUpper(d.PCIBusID())] = d.Name()
		g.usable = append(g.usable, &device{d, library, names})
	}
	g.close = func() error {
		var errs []error
		for _, d := range devices {
			errs = append(errs, d.Close())
		}
		if library != nil {
			errs = append(errs, library.Close())
		}
		return errors.Join(errs...)
	}
	return g, nil
}

// openAll opens the usable devices, and returns why the others are not usable.
func openAll(n int) (devices []*cuda.Device, problems []finding) {
	all, errs := make([]*cuda.Device, n), make([]error, n)
	sideBySide(all, func(i int, _ *cuda.Device) { all[i], errs[i] = cuda.Open(i) })
	for i, err := range errs {
		if err != nil {
			problems = append(problems, finding{about: fmt.Sprintf("cuda:%d", i), err: err})
			continue
		}
		devices = append(devices, all[i])
	}
	return devices, problems
}

// management opens NVML and asks for the driver's version.
func management() (*nvml.Library, string, error) {
	l, err := nvml.Open()
	if err != nil {
		return nil, "", err
	}
	version, err := l.Driver()
	return l, version, err
}

// device is a GPU as the doctor sees it.
type device struct {
	*cuda.Device
	library *nvml.Library     // nil without NVML
	names   map[string]string // by PCI bus id
}

var _ usableGPU = (*device)(nil)

func (d *device) device() backend.Device { return d.Device }

func (d *device) facts() (string, error) {
	free, total, err := d.FreeMemory()
	if err != nil {
		return "", err
	}
	arch := d.ComputeCapability()
	text := fmt.Sprintf("%s at %s, compute capability %d.%d, %s of %s free", d.Model(),
		d.PCIBusID(), arch/10, arch%10, gigabytes(free), gigabytes(total))
	if d.library != nil {
		links, err := d.library.Links(d.PCIBusID())
		if err != nil {
			return "", fmt.Errorf("%s: %w", text, err)
		}
		text += ", " + linksText(links, d.names)
	}
	libraries, err := d.libraries()
	if err != nil {
		return "", fmt.Errorf("%s: %w", text, err)
	}
	kernels, err := gpukernels.Describe(env.Kernels.Text(os.Getenv), arch)
	return text + "\nkernels: " + kernels + libraries, err
}

// libraries says what multiplies matrices and convolves images.
func (d *device) libraries() (text string, err error) {
	queue, err := d.NewQueue()
	if err != nil {
		return "", err
	}
	defer func() { err = errors.Join(err, queue.Close()) }()
	products, err := queue.(*cuda.Queue).NewProducts()
	if err != nil {
		return "", err
	}
	convolutions := queue.(*cuda.Queue).NewConvolutions()
	defer func() { err = errors.Join(err, convolutions.Close(), products.Close()) }()
	convolves, err := convolutions.Library()
	return "\nproducts: " + products.Library() + "\nconvolutions: " + convolves, err
}

func (d *device) wires(other usableGPU) (string, error) {
	if d.library == nil {
		return "unknown", nil
	}
	peer := other.(*device)
	mine, err := d.library.Links(d.PCIBusID())
	if err != nil {
		return "failed", err
	}
	theirs, err := d.library.Links(peer.PCIBusID())
	if err != nil {
		return "failed", err
	}
	return between(mine, theirs, peer.PCIBusID()), nil
}

// between counts the NVLinks between two GPUs, given both GPUs' links and the second one's bus ID.
func between(mine, theirs []nvml.Link, bus string) string {
	direct, up, down := 0, 0, 0
	for _, l := range mine {
		if strings.EqualFold(l.PCIBusID, bus) {
			direct++
		}
		if l.Switch {
			up++
		}
	}
	for _, l := range theirs {
		if l.Switch {
			down++
		}
	}
	switch through := min(up, down); {
	case direct > 0:
		return fmt.Sprint(direct)
	case through > 0:
		return fmt.Sprintf("%d switch", through)
	}
	return "none"
}

func gigabytes(n int) string { return fmt.Sprintf("%.1f GiB", float64(n)/(1<<30)) }

// linksText says where NVLinks lead: "NVLink: 18 to NVSwitch".
func linksText(links []nvml.Link, names map[string]string) string {
	if len(links) == 0 {
		return "no NVLink"
	}
	count := map[string]int{}
	var order []string
	for _, l := range links {
		to := farEnd(l, names)
		if count[to]++; count[to] == 1 {
			order = append(order, to)
		}
	}
	parts := make([]string, len(order))
	for i, to := range order {
		parts[i] = fmt.Sprintf("%d to %s", count[to], to)
	}
	return "NVLink: " + strings.Join(parts, ", ")
}

func farEnd(l nvml.Link, names map[string]string) string {
	name := names[strings.ToUpper(l.PCIBusID)]
	switch {
	case l.Switch:
		return "NVSwitch"
	case l.PCIBusID == "":
		return "an unknown device"
	case name == "":
		return l.PCIBusID + ", which this process does not see"
	}
	return name
}

func (d *device) reach(other usableGPU) (bool, error) {
	peer := other.(*device).Device
	ok, err := d.CanReach(peer.Ordinal())
	if !ok || err != nil {
		return false, err
	}
	return true, d.EnablePeerAccess(peer.Ordinal())
}

func (d *device) fetch(dst backend.Buffer, other usableGPU, src backend.Buffer) error {
	return d.Default().(*cuda.Queue).CopyFrom(dst, other.(*device).Device, src)
}

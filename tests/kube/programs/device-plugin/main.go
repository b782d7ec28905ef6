// What gives devices to pods, for tests/kube/gpus.rs: a device plugin, a driver of resource claims, and a client of the kubelet's list.
// The devices are names; nothing is behind them.
//
// usage: device-plugin serve RESOURCE ID...   registers the resource at the kubelet, again after each of its starts, until it is ended
//
//	device-plugin claims DRIVER DEVICE   registers a driver whose claims have this device
//	device-plugin list                   prints the kubelet's list: an array of {"pod", "container", "devices", "claimed"}
package main

import (
	"context"
	"encoding/json"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"strings"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"
	plugins "k8s.io/kubelet/pkg/apis/deviceplugin/v1beta1"
	claims "k8s.io/kubelet/pkg/apis/dra/v1"
	registration "k8s.io/kubelet/pkg/apis/pluginregistration/v1"
	resources "k8s.io/kubelet/pkg/apis/podresources/v1"
)

const (
	kubelet  = "/var/lib/kubelet"
	patience = 10 * time.Second
)

func check(err error) {
	if err != nil {
		fmt.Fprintln(os.Stderr, "device-plugin:", err)
		os.Exit(1)
	}
}

func connect(socket string) *grpc.ClientConn {
	connection, err := grpc.NewClient("unix://"+socket, grpc.WithTransportCredentials(insecure.NewCredentials()))
	check(err)
	return connection
}

// listen starts a server at a socket, in place of one that an earlier process left.
func listen(socket string, register func(*grpc.Server)) *grpc.Server {
	check(os.MkdirAll(filepath.Dir(socket), 0o755))
	_ = os.Remove(socket)
	listener, err := net.Listen("unix", socket)
	check(err)
	server := grpc.NewServer()
	register(server)
	go server.Serve(listener)
	return server
}

type devicePlugin struct {
	plugins.UnimplementedDevicePluginServer
	ids []string
}

func (plugin *devicePlugin) GetDevicePluginOptions(context.Context, *plugins.Empty) (*plugins.DevicePluginOptions, error) {
	return &plugins.DevicePluginOptions{}, nil
}

// All devices are healthy for ever.
func (plugin *devicePlugin) ListAndWatch(_ *plugins.Empty, stream plugins.DevicePlugin_ListAndWatchServer) error {
	response := &plugins.ListAndWatchResponse{}
	for _, id := range plugin.ids {
		response.Devices = append(response.Devices, &plugins.Device{ID: id, Health: plugins.Healthy})
	}
	if err := stream.Send(response); err != nil {
		return err
	}
	<-stream.Context().Done()
	return nil
}

func (plugin *devicePlugin) Allocate(_ context.Context, request *plugins.AllocateRequest) (*plugins.AllocateResponse, error) {
	response := &plugins.AllocateResponse{}
	for range request.ContainerRequests {
		response.ContainerResponses = append(response.ContainerResponses, &plugins.ContainerAllocateResponse{})
	}
	return response, nil
}

func serve(resource string, ids []string) {
	endpoint := strings.ReplaceAll(resource, "/", "_") + ".sock"
	socket := filepath.Join(kubelet, "device-plugins", endpoint)
	for {
		server := listen(socket, func(server *grpc.Server) {
			plugins.RegisterDevicePluginServer(server, &devicePlugin{ids: ids})
		})
		deadline, cancel := context.WithTimeout(context.Background(), patience)
		client := plugins.NewRegistrationClient(connect(filepath.Join(kubelet, "device-plugins", "kubelet.sock")))
		_, err := client.Register(deadline, &plugins.RegisterRequest{Version: plugins.Version, Endpoint: endpoint, ResourceName: resource}, grpc.WaitForReady(true))
		cancel()
		if err != nil { // the kubelet is away
			fmt.Fprintln(os.Stderr, "device-plugin:", err)
			server.Stop()
			continue
		}
		// a kubelet that starts removes all sockets
		for exists(socket) {
			time.Sleep(100 * time.Millisecond)
		}
		server.Stop()
	}
}

func exists(path string) bool {
	_, err := os.Stat(path)
	return err == nil
}

type claimDriver struct {
	claims.UnimplementedDRAPluginServer
	registration.UnimplementedRegistrationServer
	name, endpoint string
}

func (driver *claimDriver) GetInfo(context.Context, *registration.InfoRequest) (*registration.PluginInfo, error) {
	return &registration.PluginInfo{Type: registration.DRAPlugin, Name: driver.name, Endpoint: driver.endpoint, SupportedVersions: []string{claims.DRAPluginService}}, nil
}

func (driver *claimDriver) NotifyRegistrationStatus(_ context.Context, status *registration.RegistrationStatus) (*registration.RegistrationStatusResponse, error) {
	if status.PluginRegistered {
		fmt.Println("registered")
	} else {
		fmt.Fprintln(os.Stderr, "device-plugin: not registered:", status.Error)
	}
	return &registration.RegistrationStatusResponse{}, nil
}

// Each claim is ready at once, and has the only device of the driver.
func (driver *claimDriver) NodePrepareResources(_ context.Context, request *claims.NodePrepareResourcesRequest) (*claims.NodePrepareResourcesResponse, error) {
	response := &claims.NodePrepareResourcesResponse{Claims: map[string]*claims.NodePrepareResourceResponse{}}
	for _, claim := range request.Claims {
		device := &claims.Device{PoolName: "node1", DeviceName: os.Args[3]}
		response.Claims[claim.UID] = &claims.NodePrepareResourceResponse{Devices: []*claims.Device{device}}
	}
	return response, nil
}

func (driver *claimDriver) NodeUnprepareResources(_ context.Context, request *claims.NodeUnprepareResourcesRequest) (*claims.NodeUnprepareResourcesResponse, error) {
	response := &claims.NodeUnprepareResourcesResponse{Claims: map[string]*claims.NodeUnprepareResourceResponse{}}
	for _, claim := range request.Claims {
		response.Claims[claim.UID] = &claims.NodeUnprepareResourceResponse{}
	}
	return response, nil
}

func serveClaims(name string) {
	driver := &claimDriver{name: name, endpoint: filepath.Join(kubelet, "plugins", name, "dra.sock")}
	listen(driver.endpoint, func(server *grpc.Server) { claims.RegisterDRAPluginServer(server, driver) })
	listen(filepath.Join(kubelet, "plugins_registry", name+".sock"), func(server *grpc.Server) {
		registration.RegisterRegistrationServer(server, driver)
	})
	select {}
}

type entry struct {
	Pod       string   `json:"pod"`
	Container string   `json:"container"`
	Devices   []string `json:"devices"`
	Claimed   []string `json:"claimed"`
}

func list() {
	deadline, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	client := resources.NewPodResourcesListerClient(connect(filepath.Join(kubelet, "pod-resources", "kubelet.sock")))
	response, err := client.List(deadline, &resources.ListPodResourcesRequest{})
	check(err)
	entries := []entry{}
	for _, pod := range response.PodResources {
		for _, container := range pod.Containers {
			found := entry{Pod: pod.Namespace + "/" + pod.Name, Container: container.Name, Devices: []string{}, Claimed: []string{}}
			for _, devices := range container.Devices {
				for _, id := range devices.DeviceIds {
					found.Devices = append(found.Devices, devices.ResourceName+" "+id)
				}
			}
			for _, claim := range container.DynamicResources {
				for _, device := range claim.ClaimResources {
					found.Claimed = append(found.Claimed, device.DriverName+"/"+device.PoolName+"/"+device.DeviceName)
				}
			}
			entries = append(entries, found)
		}
	}
	check(json.NewEncoder(os.Stdout).Encode(entries))
}

func main() {
	arguments := append(os.Args[1:], "", "", "")
	switch {
	case arguments[0] == "serve" && len(os.Args) > 3:
		serve(arguments[1], os.Args[3:])
	case arguments[0] == "claims" && len(os.Args) == 4:
		serveClaims(arguments[1])
	case arguments[0] == "list":
		list()
	default:
		fmt.Fprintln(os.Stderr, "usage: device-plugin serve RESOURCE ID... | claims DRIVER DEVICE | list")
		os.Exit(2)
	}
}

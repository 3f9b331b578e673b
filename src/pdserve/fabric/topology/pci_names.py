"""Names of the PCI devices that an operator would want to see by name; any other shows as its ids.

Source: the PCI id database (pci-ids.ucw.cz), shortened.
"""

from pdserve.fabric.topology.machine import AMAZON, MELLANOX, NVIDIA, PciFunction

_NAMES = {
    (NVIDIA, 0x1DB5): "V100 SXM2 32GB",
    (NVIDIA, 0x1EB8): "T4",
    (NVIDIA, 0x20B0): "A100 SXM4 40GB",
    (NVIDIA, 0x20B2): "A100 SXM4 80GB",
    (NVIDIA, 0x20B5): "A100 PCIe 80GB",
    (NVIDIA, 0x20F1): "A100 PCIe 40GB",
    (NVIDIA, 0x2236): "A10",
    (NVIDIA, 0x2330): "H100 SXM5 80GB",
    (NVIDIA, 0x2331): "H100 PCIe",
    (NVIDIA, 0x2335): "H200 SXM 141GB",
    (NVIDIA, 0x2342): "GH200 120GB",
    (NVIDIA, 0x26B9): "L40S",
    (NVIDIA, 0x27B8): "L4",
    (NVIDIA, 0x2901): "B200",
    (MELLANOX, 0x1013): "ConnectX-4",
    (MELLANOX, 0x1015): "ConnectX-4 Lx",
    (MELLANOX, 0x1017): "ConnectX-5",
    (MELLANOX, 0x1019): "ConnectX-5 Ex",
    (MELLANOX, 0x101B): "ConnectX-6",
    (MELLANOX, 0x101D): "ConnectX-6 Dx",
    (MELLANOX, 0x101E): "ConnectX virtual function",
    (MELLANOX, 0x101F): "ConnectX-6 Lx",
    (MELLANOX, 0x1021): "ConnectX-7",
    (MELLANOX, 0x1023): "ConnectX-8",
    (MELLANOX, 0xA2D6): "BlueField-2",
    (MELLANOX, 0xA2DC): "BlueField-3",
    (AMAZON, 0xEC20): "ENA",
    (AMAZON, 0xEFA0): "EFA",
    (AMAZON, 0xEFA1): "EFA",
    (AMAZON, 0xEFA2): "EFA",
    (AMAZON, 0xEFA3): "EFA",
}


def pci_name(pci: PciFunction) -> str:
    return _NAMES.get((pci.vendor_id, pci.device_id), f"{pci.vendor_id:04x}:{pci.device_id:04x}")
